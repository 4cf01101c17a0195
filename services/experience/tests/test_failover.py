"""Two processes of the service, at addresses of their own, on one ledger on a Redis server."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import pytest
import yaml
from redis import Redis

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_experience import fsck, restore
from treadle_runtime.channel import call, connect
from treadle_runtime.errors import RemoteError
from treadle_runtime.testing import RedisProcess

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not RedisProcess.is_installed(), reason="NO redis-server ON PATH"),
]

TAKE_OVER_S = 15.0


@pytest.fixture
def server(tmp_path):
    process = RedisProcess(tmp_path / "redis").start()
    yield process
    process.kill()


@pytest.fixture
def start(tmp_path, server):
    """Starts a process of the run at an address."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"prompt": "1+1"}\n' * 8, encoding="utf-8")
    values = {
        "run": {"id": "run", "dir": str(tmp_path), "model": str(tmp_path)},
        "listen": "",
        "steps": 4,
        "tasks_per_step": 2,
        "group_size": 2,
        "max_lag": 1,
        "deadline_s": 60,
        "source": {"name": "jsonl", "path": str(tasks)},
        "ledger": {"name": "redis", "url": server.url},
    }
    (tmp_path / "config").mkdir()
    path = tmp_path / "config" / "experience.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    command = [sys.executable, "-m", "treadle_experience.main", "--config", str(path)]
    with contextlib.ExitStack() as started:

        def start_(address: str) -> subprocess.Popen[str]:
            child = started.enter_context(
                subprocess.Popen([*command, f"listen={address}"], stderr=subprocess.PIPE, text=True)
            )
            started.callback(child.kill)
            return child

        yield start_


@pytest.fixture
def addresses(tmp_path):
    return [f"unix:{tmp_path}/{name}" for name in ("one", "two")]


def read_until(child, words: str) -> str:
    for line in child.stderr:
        if words in line:
            return line
    raise AssertionError(f"ended without {words!r}")


async def ask(channel, method: str, **fields):
    request = getattr(pb, f"{method}Request")(run_id="run", **fields)
    stub = rpc.ExperienceServiceStub(channel)
    return await call(getattr(stub, method), request, timeout_s=30, budget_s=30)


async def begin(channel) -> None:
    """A run from its start to a version that is served."""
    epoch = (await ask(channel, "AcquireRun", holder="trainer")).trainer_epoch
    of = {"trainer_epoch": epoch}
    await ask(channel, "CommitCheckpoint", digest="a" * 64, step=0, path="c/0", **of)
    await ask(channel, "AnnounceVersion", step=0, request_id="v", **of)
    await ask(channel, "CommitVersion", version=1, weights_digest="0" * 16, **of)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_standby_at_another_address_takes_over_and_clients_find_it(
    start, addresses, tmp_path, signum
) -> None:
    first = start(addresses[0])
    read_until(first, "serving on")
    second = start(addresses[1])
    read_until(second, "waiting: process")
    async with connect(addresses) as channel:
        await begin(channel)
        before = await ask(channel, "GetRun")

        first.send_signal(signum)
        began = time.monotonic()
        after = await ask(channel, "GetRun")
        took_s = time.monotonic() - began
        lease = {"replica_id": "r1", "served_version": 1, "max_tickets": 9, "slots": 9}
        leased = await ask(channel, "LeaseTickets", **lease)
        position = (await ask(channel, "GetRun")).position

        first.send_signal(signal.SIGCONT)
        status = await asyncio.to_thread(first.wait, 20)
        last = await ask(channel, "GetRun")

    assert after == before
    assert took_s < TAKE_OVER_S
    assert len(leased.tickets) == 8
    assert status == (-signal.SIGKILL if signum is signal.SIGKILL else 1)  # it learned its end
    assert last.position == position
    assert fsck.main([str(tmp_path)]) == 0


async def test_one_that_ends_in_order_is_followed_at_once(start, addresses) -> None:
    first = start(addresses[0])
    read_until(first, "serving on")
    second = start(addresses[1])
    read_until(second, "waiting: process")
    async with connect(addresses) as channel:
        await begin(channel)

        first.send_signal(signal.SIGTERM)
        began = time.monotonic()
        await ask(channel, "GetRun")

    assert time.monotonic() - began < TAKE_OVER_S / 2
    assert first.wait(10) == 0


async def test_a_server_that_restarts_is_waited_for_and_nothing_is_lost(
    start, addresses, server, tmp_path
) -> None:
    child = start(addresses[0])
    async with connect(addresses[0]) as channel:
        await begin(channel)
        server.kill()
        lease = {"replica_id": "r1", "served_version": 1, "max_tickets": 9, "slots": 9}
        leasing = asyncio.ensure_future(ask(channel, "LeaseTickets", **lease))
        done, _ = await asyncio.wait({leasing}, timeout=0.5)
        server.start()
        leased = await leasing

    assert not done  # nothing is answered that is not stored
    assert len(leased.tickets) == 8
    assert child.poll() is None
    assert fsck.main([str(tmp_path)]) == 0


async def test_a_server_without_room_stops_time_and_nobody_is_told_otherwise(
    start, addresses, server, tmp_path
) -> None:
    start(addresses[0])
    lease = {"replica_id": "r1", "served_version": 1, "max_tickets": 9, "slots": 9}
    async with connect(addresses[0]) as channel:
        await begin(channel)
        with Redis.from_url(server.url) as client:
            client.config_set("maxmemory", 1)
            with pytest.raises(RemoteError) as refused:
                await ask(channel, "LeaseTickets", **lease)
            client.config_set("maxmemory", 0)
        stub = rpc.ExperienceServiceStub(channel)
        request = pb.GetRunRequest(run_id="run")
        found = await call(stub.GetRun, request, timeout_s=30, patient=True)

    assert (refused.value.reason, refused.value.retry_after_s) == ("LEDGER_FULL", 1.0)
    assert found.episodes["issued"] == 8  # what was decided is kept
    assert fsck.main([str(tmp_path)]) == 0


async def test_a_lost_server_is_refused_until_its_archive_brings_it_back(
    start, addresses, server, tmp_path
) -> None:
    path = tmp_path / "config" / "experience.yaml"
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    values["ledger"] |= {"durability": "fleet", "archive": str(tmp_path / "archive")}
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    first = start(addresses[0])
    async with connect(addresses[0]) as channel:
        await begin(channel)
        before = await ask(channel, "GetRun")
    first.kill()
    first.wait(10)
    server.kill()
    server.forget()
    server.start()
    refused = start(addresses[0])
    assert refused.wait(120) == 2

    assert restore.main([str(tmp_path)]) == 0

    start(addresses[0])
    async with connect(addresses[0]) as channel:
        assert await ask(channel, "GetRun") == before
    assert before.durability == "fleet"
    assert fsck.main([str(tmp_path)]) == 0


async def test_a_ledger_that_lost_its_state_is_refused_for_good(start, addresses, server) -> None:
    first = start(addresses[0])
    async with connect(addresses[0]) as channel:
        await begin(channel)
    first.kill()
    first.wait(10)
    server.kill()
    server.forget()
    server.start()

    second = start(addresses[0])

    assert "the server holds nothing" in read_until(second, "configuration: ledger")
    assert second.wait(20) == 2


def test_a_server_that_is_set_up_to_keep_less_is_a_wrong_configuration(
    start, addresses, server
) -> None:
    server.kill()
    server.start(maxmemory_policy="allkeys-lru")

    child = start(addresses[0])

    assert "expected maxmemory-policy noeviction" in read_until(child, "configuration: ledger")
    assert child.wait(20) == 2
