import asyncio
import contextlib
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from treadle_runtime.workers import pool, process
from treadle_runtime.workers.pool import WorkerPool
from treadle_runtime.workers.process import WorkerProcess, WorkerStartError

pytestmark = pytest.mark.processes

PROGRAM = Path(__file__).with_name("toy_worker.py")
TOY = runpy.run_path(str(PROGRAM))
Say = TOY["Say"]


class Toy(WorkerProcess[Any]):
    """A toy_worker.py; what came of it is in `heard`."""

    def __init__(self) -> None:
        super().__init__("toy", [str(PROGRAM)], TOY["FRAMING"])
        self.heard: asyncio.Queue[Any] = asyncio.Queue()

    @classmethod
    async def start(cls, log: Path, how: str = "well") -> "Toy":
        toy = cls()
        await toy.begin(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), Say.START, how)
        return toy

    def do(self, what: str) -> None:
        self.packer.send(Say.DO, what)

    def hear(self, say: Any, fields: list[Any]) -> None:
        if say is Say.READY:
            self.ready()
        elif say is Say.REFUSED:
            self.refuse(*fields)
        elif fields == ["surprise"]:
            raise ValueError("a surprise")
        else:
            self.heard.put_nowait(fields[0])

    async def gone(self, cause: str) -> None:
        self.heard.put_nowait(f"gone: {cause}")


class Toys(WorkerPool[Toy]):
    """Toys that start while `how` is well."""

    def __init__(self, log: Path, places: int = 1) -> None:
        super().__init__(places)
        self.log = log
        self.how = "well"

    async def start_worker(self, place: int) -> Toy:
        return await Toy.start(self.log, self.how if place == 0 else "well")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "FIRST_DELAY_S", 0.01)


@contextlib.asynccontextmanager
async def toy_of(log: Path) -> AsyncGenerator[Toy]:
    toy = await Toy.start(log)
    try:
        yield toy
    finally:
        await toy.stop()


async def ended(pid: int) -> bool:
    """Whether a process ends."""
    watched = os.pidfd_open(pid)
    readable, _, _ = await asyncio.to_thread(select.select, [watched], [], [], 30)
    os.close(watched)
    return bool(readable)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110, what is waited for has no event
            await asyncio.sleep(0.01)


async def test_one_whose_end_cannot_be_told_is_over_all_the_same(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(self: Toy, cause: str) -> None:
        raise ValueError(f"nobody to tell: {cause}")

    monkeypatch.setattr(Toy, "gone", fails)
    toy = await Toy.start(log)
    toy.do("exit")
    async with asyncio.timeout(30):
        await toy.ended.wait()
        await toy.stop()
    assert "nobody to tell" in caplog.text


async def test_a_worker_sees_no_variable_that_could_hold_a_secret(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    async with toy_of(log) as toy:
        toy.do("environment")
        seen = await toy.heard.get()
    assert "PATH" in seen
    assert "SOME_API_KEY" not in seen


@pytest.mark.parametrize(
    ("how", "says"),
    [
        pytest.param("refuse", "I would rather not", id="refuses"),
        pytest.param("exit", "the toy ended: exit status 1", id="ends"),
        pytest.param("write nonsense", "the toy ended: it broke the protocol", id="nonsense"),
    ],
)
async def test_a_worker_that_does_not_start_says_why(log: Path, how: str, says: str) -> None:
    with pytest.raises(WorkerStartError, match=says):
        await Toy.start(log, how)


async def test_a_worker_that_is_not_ready_in_time_is_ended(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "START_S", 0.1)
    with pytest.raises(WorkerStartError, match=r"no toy after 0\.1 s"):
        await Toy.start(log, "hang")


async def test_the_last_words_of_a_worker_are_heard_before_its_end(log: Path) -> None:
    async with toy_of(log) as toy:
        toy.do("something")
        toy.do("exit")
        await toy.ended.wait()
        assert not toy.alive
    assert [toy.heard.get_nowait() for _ in range(2)] == ["something", "gone: exit status 1"]
    assert "as I was told" in await asyncio.to_thread(log.read_text)


@pytest.mark.parametrize("what", ["write nonsense", "surprise"])
async def test_a_worker_that_breaks_the_protocol_is_ended(
    log: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    async with toy_of(log) as toy:
        assert toy.alive
        toy.do(what)
        assert "it broke the protocol: " in await toy.heard.get()
        assert not toy.alive
    assert "broke the protocol" in caplog.text


async def test_a_worker_that_hangs_is_ended_when_its_line_is_cut(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LAST_S", 0.1)
    async with toy_of(log) as toy:
        toy.do("something")
        toy.do("hang")
        await toy.heard.get()
        toy._transport.abort()
        assert await toy.heard.get() == "gone: exit status -9"


async def test_what_a_worker_started_ends_with_it(log: Path) -> None:
    async with toy_of(log) as toy:
        toy.do("leave a child")
        child = asyncio.create_task(ended(await toy.heard.get()))
        await asyncio.sleep(0)
        os.kill(toy._process.pid, signal.SIGKILL)
        assert await child


async def test_a_worker_that_ends_is_started_again(log: Path) -> None:
    toys = Toys(log, places=2)
    await toys.start()
    first, other = toys.live
    running = asyncio.create_task(toys.run())
    first.do("exit")
    await first.ended.wait()
    assert toys.live == [other]
    await until(lambda: toys.restarts == 1)
    again, unharmed = toys.live
    assert again is not first
    assert unharmed is other
    running.cancel()
    await asyncio.wait({running})
    assert again.ended.is_set()
    assert toys.live == []


async def test_a_pool_with_a_worker_that_does_not_start_leaves_none_behind(log: Path) -> None:
    toys = Toys(log, places=2)
    toys.how = "refuse"
    with pytest.raises(WorkerStartError, match="I would rather not"):
        await toys.start()
    assert toys.live == []


async def test_a_pool_gives_up_a_worker_that_cannot_be_started_again(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "STARTS", 2)
    toys = Toys(log)
    await toys.start()
    toys.how = "refuse"
    toys.live[0].do("exit")
    with pytest.raises(ExceptionGroup) as gave_up:
        await toys.run()
    assert gave_up.group_contains(WorkerStartError, match="I would rather not")
    assert toys.restarts == 0


HELD = """
import asyncio, time
from treadle_runtime.workers import program

def held():
    time.sleep(300)

async def serve(line):
    asyncio.get_running_loop().call_soon(held)
    await program.stay(0.3)

program.run("held", serve)
"""


def test_a_worker_whose_loop_is_held_says_where_and_ends() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        done = subprocess.run(
            [sys.executable, "-c", HELD, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.returncode == 1
    assert "in held" in done.stderr
