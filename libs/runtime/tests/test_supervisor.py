import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from treadle_runtime import supervisor
from treadle_runtime.supervisor import ChildFailedError, ChildSpec, Supervisor

pytestmark = pytest.mark.processes


def child(directory: Path, name: str, code: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), directory / f"{name}.log")


COUNT = """
import os, pathlib, signal
lives = pathlib.Path({path!r})
lives.open("a").write("x")
"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_DELAY_S", 0.01)


async def test_a_child_that_dies_is_started_again_until_it_is_done(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    code = COUNT.format(path=str(lives)) + (
        "if len(lives.read_text()) < 3: os.kill(os.getpid(), signal.SIGKILL)"
    )
    watched = Supervisor([child(tmp_path, "mortal", code)])
    watched.start()

    await asyncio.wait_for(watched.until_done(["mortal"]), 20)

    assert lives.read_text() == "xxx"


async def test_a_child_that_cannot_live_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    code = COUNT.format(path=str(lives)) + "raise SystemExit('no disk left')"
    watched = Supervisor([child(tmp_path, "ill", code)])
    watched.start()

    with pytest.raises(ChildFailedError, match="no disk left"):
        await asyncio.wait_for(watched.until_done(["ill"]), 30)

    assert 2 < len(lives.read_text()) < 10


async def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    code = COUNT.format(path=str(lives)) + "raise SystemExit(2)"
    watched = Supervisor([child(tmp_path, "wrong", code)])
    watched.start()

    with pytest.raises(ChildFailedError, match="status 2"):
        await asyncio.wait_for(watched.until_done(["wrong"]), 20)

    assert lives.read_text() == "x"


async def test_a_child_that_does_not_drain_is_killed(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(started)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    watched = Supervisor([child(tmp_path, "deaf", code)])
    watched.start()
    async with asyncio.timeout(20):
        while not started.exists() or not started.read_text():  # noqa: ASYNC110, another process
            await asyncio.sleep(0.01)

    await watched.drain(grace_s=0.2)

    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), signal.SIG_DFL)


async def test_a_signal_is_named_as_the_cause(tmp_path: Path) -> None:
    watched = Supervisor([child(tmp_path, "hit", "import os; os.kill(os.getpid(), 9)")])
    watched.start()

    with pytest.raises(ChildFailedError, match="SIGKILL"):
        await asyncio.wait_for(watched.until_done(["hit"]), 30)


WATCH = """
import os, pathlib, sys, time
os.read(int(os.environ["TREADLE_SUPERVISOR_FD"]), 1)
time.sleep(float(sys.argv[2]))
with open(sys.argv[1], "a") as order: order.write(sys.argv[3])
"""

SUPERVISE = """
import asyncio, os, pathlib, signal, sys
from treadle_runtime.supervisor import ChildSpec, Supervisor

async def main():
    here = pathlib.Path(sys.argv[1])
    specs = [
        ChildSpec(name, (sys.executable, "-c", sys.argv[2], here / "o", wait, name), here / name)
        for name, wait in (("a", "0.4"), ("b", "0.2"), ("c", "0"))
    ]
    Supervisor(specs).start()
    await asyncio.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_children_drain_in_their_order_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SUPERVISE, str(tmp_path), WATCH], timeout=20, check=False)
    order = tmp_path / "o"
    give_up = time.monotonic() + 20
    while (order.read_text() if order.exists() else "") != "abc":
        assert time.monotonic() < give_up
        time.sleep(0.02)
