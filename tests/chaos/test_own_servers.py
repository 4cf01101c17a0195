"""A run's own Redis and NATS: killed, orphaned, and gone on with."""

import os
import shutil
import signal
import time

import pytest
from small_run import SmallRun, account, state_of

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        shutil.which("redis-server") is None, reason="NO redis-server: apt-get install redis-server"
    ),
]

REDIS = "recipes/overlays/redis.yaml"
GONE = (None, "Z", "X")


@pytest.fixture
def run(tmp_path):
    words = ("experience.steps=12", "run.doorbell={name: nats}")
    small = SmallRun(tmp_path / "run", *words, overlays=[REDIS])
    yield small
    small.kill()


def test_a_ledger_server_that_is_killed_comes_back_and_nothing_is_lost(run) -> None:
    run.start()
    for _ in range(2):
        at = run.step()
        assert run.wait_for("two steps", lambda at=at: run.step() >= at + 2, timeout_s=120)
        os.kill(run.victim("redis"), signal.SIGKILL)
    run.finish(timeout_s=200)

    assert not [measure for measure in account(run) if not measure.holds]
    signals = [row["signal"] for row in run.rows("supervisor", "death")]
    assert signals.count("SIGKILL") == 2


def test_who_loses_its_supervisor_drains_in_order_servers_last_and_goes_on(run) -> None:
    run.start()
    assert run.wait_for("step 3", lambda: run.step() >= 3, timeout_s=120)
    pids = {name: run.victim(name) for name in run.victims()}
    assert {"redis", "nats", "experience"} <= pids.keys()

    run._running.kill()
    run._running.wait()
    give_up = time.monotonic() + 90
    while not all(state_of(pid) in GONE for pid in pids.values()):
        assert time.monotonic() < give_up, run.logs()
        time.sleep(0.1)

    first = run.step()
    trainer = (run.directory / "logs" / "trainer.log").read_text()
    assert "trainer is done" in trainer, trainer  # its last checkpoint was committed
    run.start()
    run.finish(timeout_s=200)

    assert run.step() == 12 > first
    assert not [measure for measure in account(run) if not measure.holds]
