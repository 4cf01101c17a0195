"""The service as a process: started alone, killed, started again, drained, and checked."""

import contextlib
import json
import signal
import subprocess
import sys

import pytest
import yaml

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_experience import fsck
from treadle_runtime.channel import call, connect


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
