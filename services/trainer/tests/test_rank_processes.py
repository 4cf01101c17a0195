"""Ranks as processes: whatever becomes of one of them, all end within a bound."""

import json
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.processes]

PROGRAM = Path(__file__).parent / "ranks_program.py"
TIMEOUT_S = 3
START_S = 120
"""How long processes may take to import torch on a busy machine."""


@pytest.fixture
def start(tmp_path):
    """Starts the program; ends whatever is left of it."""
    started = []

    def begin(*words, launcher=()):
        (tmp_path / "payloads").mkdir(exist_ok=True)
        command = [sys.executable, *launcher, PROGRAM, tmp_path, *words]
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for pid in pids(tmp_path).values():
        if is_running(pid):
            psutil.Process(pid).kill()
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def pids(directory):
    return {
        int(path.parent.name.removeprefix("rank-")): int(path.read_text())
        for path in directory.glob("rank-*/pid")
        if path.read_text()
    }


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition, limit_s):
    """Whether the condition comes to hold in time."""
    give_up = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


def ended(process, limit_s):
    """Exit status and what it wrote."""
    out, errors = process.communicate(timeout=limit_s)
    return process.returncode, out, errors


async def test_two_processes_come_to_the_parameters_of_one_though_a_batch_is_later_than_any_timeout(
    start, tmp_path
):
    status, out, errors = ended(start(2, TIMEOUT_S, "slow-claim"), START_S)
    assert status == 0, errors
    assert not any(map(is_running, pids(tmp_path).values()))

    names = runpy.run_path(str(PROGRAM))
    (tmp_path / "alone").mkdir()
    run = names["run_of"](names["conftest"](), tmp_path, tmp_path / "alone")
    trainer = run.trainer()
    await run.finish(trainer)
    versions, table = json.loads(out)
    assert versions == len(run.refit.committed) == 5
    wanted = trainer._loaded.parameters()["table"].flatten().tolist()
    assert table == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_all_ranks_end_when_one_is_killed_or_stands_still(start, tmp_path, what):
    process = start(3, TIMEOUT_S, what)
    assert until((tmp_path / "hurt").exists, START_S)
    status, _, errors = ended(process, TIMEOUT_S + 10)
    assert status != 0
    assert "RanksLostError" in errors
    assert until(lambda: not any(map(is_running, pids(tmp_path).values())), 10)


def test_a_follower_that_stands_still_at_the_end_does_not_hold_the_run_up(start, tmp_path):
    status, out, errors = ended(start(2, TIMEOUT_S, "stop-at-the-end"), START_S)
    assert status == 0, errors
    assert json.loads(out)[0] == 5
    assert not any(map(is_running, pids(tmp_path).values()))


def test_followers_end_with_a_leader_that_is_killed(start, tmp_path):
    process = start(3, TIMEOUT_S, "kill-leader")
    status, _, _ = ended(process, START_S)
    assert status == -signal.SIGKILL
    assert until(lambda: not any(map(is_running, pids(tmp_path).values())), 10)


def test_followers_end_while_their_leader_stands_still(start, tmp_path):
    start(2, TIMEOUT_S, "stop-leader")
    assert until((tmp_path / "hurt").exists, START_S)
    assert until(lambda: not is_running(pids(tmp_path)[1]), TIMEOUT_S + 10)


def test_torchrun_starts_all_ranks_again_when_one_dies(start, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1",
                "--standalone")  # fmt: skip
    status, out, errors = ended(start(2, TIMEOUT_S, "kill", launcher=launcher), 2 * START_S)
    assert status == 0, errors
    assert (tmp_path / "hurt").exists()
    assert json.loads(out)[0] >= 4
