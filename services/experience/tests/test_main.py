"""The service as a process: started alone, killed, started again, drained, and checked."""

import asyncio
import contextlib
import json
import signal
import sqlite3
import subprocess
import sys

import grpc.aio
import pytest
import yaml

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_experience import fsck
from treadle_runtime.channel import call, connect

pytestmark = pytest.mark.processes


@pytest.fixture
def config(tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1+1"}\n' * 8, encoding="utf-8")
    source = {"name": "jsonl", "path": str(tasks)}
    values = {
        "run": {"id": "run", "dir": str(tmp_path), "model": str(tmp_path)},
        "listen": f"unix:{tmp_path}/s",
        "steps": 4,
        "tasks_per_step": 2,
        "group_size": 2,
        "max_lag": 1,
        "deadline_s": 60,
        "source": source,
        "evaluation": {"every": 5, "sets": [{"name": "held", "source": source, "limit": 1}]},
    }
    path = tmp_path / "experience.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


@contextlib.contextmanager
def process(config, *overrides: str):
    command = [sys.executable, "-m", "treadle_experience.main", "--config", str(config)]
    with subprocess.Popen([*command, *overrides], stderr=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


async def ask(channel, method: str, **fields):
    request = getattr(pb, f"{method}Request")(run_id="run", **fields)
    stub = rpc.ExperienceServiceStub(channel)
    return await call(getattr(stub, method), request, timeout_s=10, budget_s=30)


async def test_what_was_answered_survives_a_kill_and_a_drain(config, tmp_path, capsys) -> None:
    lease = {"replica_id": "r1", "served_version": 1, "max_tickets": 9, "slots": 9}
    async with connect(f"unix:{tmp_path}/s") as channel:
        with process(config) as child:
            await ask(channel, "AcquireRun", holder="trainer")
            await ask(
                channel, "CommitCheckpoint", trainer_epoch=1, digest="a" * 64, step=0, path="c/0"
            )
            await ask(channel, "AnnounceVersion", trainer_epoch=1, step=0, request_id="v")
            await ask(channel, "CommitVersion", trainer_epoch=1, version=1, weights_digest="0" * 16)
            leased = await ask(channel, "LeaseTickets", **lease)
            before = await ask(channel, "GetRun")
            child.kill()
            child.wait(10)
        after_the_kill = fsck.main([str(tmp_path)])
        with process(config) as child:
            again = await ask(channel, "GetRun")
            failed = await ask(
                channel,
                "FailEpisode",
                replica_id="r1",
                attempt=pb.Attempt(episode_id=leased.tickets[0].episode_id, attempt=1),
                failure_class=3,
            )
            child.send_signal(signal.SIGTERM)
            status = child.wait(20)

    assert [t.evaluation for t in leased.tickets] == ["held"]
    assert again == before
    assert failed.retried
    assert status == 0
    assert (after_the_kill, fsck.main([str(tmp_path)])) == (0, 0)
    rows = (tmp_path / "metrics" / "experience.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[-1])["failures_infrastructure"] == 1


def test_a_wrong_configuration_is_told_before_anything_starts(config) -> None:
    with process(config, "max_lag=-1", "source.path=nowhere.jsonl", "stepz=3") as child:
        _, errors = child.communicate(timeout=30)

    assert child.returncode == 2
    assert "max_lag" in errors
    assert "did you mean steps" in errors


async def serve_a_ticket(channel):
    """A run from its start to a lease; returns the epoch of its trainer and the ticket."""
    epoch = (await ask(channel, "AcquireRun", holder="trainer")).trainer_epoch
    of = {"trainer_epoch": epoch}
    await ask(channel, "CommitCheckpoint", digest="a" * 64, step=0, path="c/0", **of)
    await ask(channel, "AnnounceVersion", step=0, request_id="v", **of)
    await ask(channel, "CommitVersion", version=1, weights_digest="0" * 16, **of)
    lease = {"replica_id": "r1", "served_version": 1, "max_tickets": 1, "slots": 9}
    return (await ask(channel, "LeaseTickets", **lease)).tickets[0]


def fail(ticket):
    return {
        "replica_id": "r1",
        "attempt": pb.Attempt(episode_id=ticket.episode_id, attempt=ticket.attempt),
        "failure_class": 3,
    }


def writer_epoch(directory) -> int:
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as db:
        return db.execute("SELECT writer_epoch FROM run").fetchone()[0]


def read_until(child, words: str) -> None:
    for line in child.stderr:
        if words in line:
            return
    raise AssertionError(f"ended without {words!r}")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_standby_takes_over_by_raising_the_epoch_and_clients_go_on(
    config, tmp_path, signum
) -> None:
    async with connect(f"unix:{tmp_path}/s") as channel:
        with process(config) as first, contextlib.ExitStack() as others:
            read_until(first, "serving on")
            second = others.enter_context(process(config))
            read_until(second, "standing by")
            ticket = await serve_a_ticket(channel)
            before = await ask(channel, "GetRun")
            epoch = writer_epoch(tmp_path)

            first.send_signal(signum)

            # On the channel that knew the first one, in the time that a call may take.
            after = await call(
                rpc.ExperienceServiceStub(channel).GetRun,
                pb.GetRunRequest(run_id="run"),
                timeout_s=2,
                budget_s=20,
            )
            failed = await ask(channel, "FailEpisode", **fail(ticket))
            assert first.wait(1) == -signal.SIGKILL
            second.send_signal(signal.SIGTERM)
            assert second.wait(20) == 0

    assert epoch == 1  # a standby that only waits fences nobody
    assert writer_epoch(tmp_path) == 2
    assert after == before
    assert failed.retried
    assert fsck.main([str(tmp_path)]) == 0


async def test_a_stopped_writer_that_wakes_after_its_successor_took_over_is_fenced(
    config, tmp_path
) -> None:
    elsewhere = f"unix:{tmp_path}/t"  # out of reach of the one who would end it
    async with connect(f"unix:{tmp_path}/s") as old, connect(elsewhere) as new:
        with process(config) as first, contextlib.ExitStack() as others:
            await ask(old, "GetRun")  # nothing of it is on its way to the disk
            first.send_signal(signal.SIGSTOP)
            second = others.enter_context(process(config, f"listen={elsewhere}"))
            read_until(second, "serving on")
            ticket = await serve_a_ticket(new)
            position = (await ask(new, "GetRun")).position
            late = asyncio.ensure_future(
                rpc.ExperienceServiceStub(old).AcquireRun(
                    pb.AcquireRunRequest(run_id="run", holder="late"), timeout=20
                )
            )
            first.send_signal(signal.SIGCONT)

            with pytest.raises(grpc.aio.AioRpcError, match="fenced by epoch 2"):
                await late
            assert first.wait(20) == 1
            assert (await ask(new, "GetRun")).position == position
            assert (await ask(new, "FailEpisode", **fail(ticket))).retried

    assert fsck.main([str(tmp_path)]) == 0
