import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treadle_runtime import liveness, supervisor
from treadle_runtime.deaths import _counter, memory_kill
from treadle_runtime.supervisor import ChildFailedError, ChildSpec, Supervisor
from treadle_runtime.tracker import JsonlTracker

pytestmark = pytest.mark.processes


def child(directory: Path, name: str, code: str) -> ChildSpec:
    return ChildSpec(name, (sys.executable, "-c", code), directory / f"{name}.log")


def supervised(directory: Path, *specs: ChildSpec) -> Supervisor:
    return Supervisor(specs, JsonlTracker(directory / "lives.jsonl"))


def deaths(directory: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (directory / "lives.jsonl").read_text().splitlines()]
    return [row for row in rows if row["name"] == "death"]


def pid_of(directory: Path) -> int:
    """Of the only child's only life."""
    (row,) = map(json.loads, (directory / "lives.jsonl").read_text().splitlines())
    return row["pid"]


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
    watched = supervised(tmp_path, child(tmp_path, "mortal", code))
    watched.start()

    await asyncio.wait_for(watched.until_done(["mortal"]), 20)

    assert lives.read_text() == "xxx"


async def test_a_child_that_cannot_live_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    code = COUNT.format(path=str(lives)) + "raise SystemExit('no disk left')"
    watched = supervised(tmp_path, child(tmp_path, "ill", code))
    watched.start()

    with pytest.raises(ChildFailedError, match="no disk left"):
        await asyncio.wait_for(watched.until_done(["ill"]), 30)

    assert 2 < len(lives.read_text()) < 10


async def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path) -> None:
    lives = tmp_path / "lives"
    code = COUNT.format(path=str(lives)) + "raise SystemExit(2)"
    watched = supervised(tmp_path, child(tmp_path, "wrong", code))
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
    watched = supervised(tmp_path, child(tmp_path, "deaf", code))
    watched.start()
    async with asyncio.timeout(20):
        while not started.exists() or not started.read_text():  # noqa: ASYNC110, another process
            await asyncio.sleep(0.01)

    await watched.drain(grace_s=0.2)

    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), signal.SIG_DFL)


async def test_a_signal_is_named_as_the_cause(tmp_path: Path) -> None:
    watched = supervised(tmp_path, child(tmp_path, "hit", "import os; os.kill(os.getpid(), 9)"))
    watched.start()

    with pytest.raises(ChildFailedError, match="SIGKILL"):
        await asyncio.wait_for(watched.until_done(["hit"]), 30)


async def test_a_death_is_one_row_and_one_line_with_its_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lives = tmp_path / "lives"
    code = COUNT.format(path=str(lives)) + (
        "from treadle_runtime import last_call; last_call.begin(os.environ)\n"
        "if len(lives.read_text()) == 1:\n"
        "    hog = bytearray(200 << 20)\n"
        "    last_call.note('called ClaimStep'); print('the last line')\n"
        "    raise SystemExit(7)\n"
        "if len(lives.read_text()) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    watched = supervised(tmp_path, child(tmp_path, "mortal", code))
    watched.start()

    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(watched.until_done(["mortal"]), 20)

    first, second = deaths(tmp_path)
    told = [r.getMessage() for r in caplog.records if "mortal ended" in r.getMessage()]
    assert len(told) == 2
    assert all("\n" not in line for line in told)
    assert (first["service"], first["signal"], first["status"]) == ("mortal", "", 7)
    assert (first["last_rpc"], first["last_line"]) == ("called ClaimStep", "the last line")
    assert 200 < first["peak_rss_mb"] < 2000
    assert 0 <= first["last_rpc_ago_s"] <= first["lived_s"] < 20
    assert (first["memory_kill"], first["restarts"]) == ("no", 0)
    assert (second["signal"], second["restarts"], second["last_rpc"]) == ("SIGKILL", 1, "")
    assert second["memory_kill"] in ("no", "unknown")
    assert first["pid"] != second["pid"]


async def test_deaths_in_a_row_wait_longer_and_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = supervised(tmp_path, child(tmp_path, "ill", "raise SystemExit(1)"))
    watched.start()

    with caplog.at_level(logging.WARNING), pytest.raises(ChildFailedError):
        await asyncio.wait_for(watched.until_done(["ill"]), 30)

    waits = [r.args[-1] for r in caplog.records if "restarted in" in r.getMessage() and r.args]
    assert waits == [0.01 * 2**n for n in range(5)]
    assert len(deaths(tmp_path)) == 6


async def test_a_child_that_has_answered_is_not_given_up_for_some_short_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server does that a full disk ends as soon as it is up."""
    monkeypatch.setattr(supervisor, "_MOST_OF_PROVEN", 9)
    code = "import time; time.sleep(0.2); raise SystemExit('no room')"
    ill = replace(child(tmp_path, "ill", code), answers=lambda: True)
    watched = Supervisor([ill], JsonlTracker(tmp_path / "lives.jsonl"), hung_s=0.6)
    watched.start()

    with caplog.at_level(logging.WARNING), pytest.raises(ChildFailedError, match="no room"):
        await asyncio.wait_for(watched.until_done(["ill"]), 30)

    waits = [r.args[-1] for r in caplog.records if "restarted in" in r.getMessage() and r.args]
    assert waits == [0.01] * 8  # each came up: there is nothing to wait longer and longer for
    assert len(deaths(tmp_path)) == 9


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether it answered, at every look at a child."""
    seen: list[bool] = []
    answers = liveness._answers

    async def recorded(*arguments: Any) -> bool:
        seen.append(await answers(*arguments))
        return seen[-1]

    monkeypatch.setattr(liveness, "_answers", recorded)
    return seen


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110, what is waited for is in another process
            await asyncio.sleep(0.01)


def lone_service(directory: Path, address: str) -> ChildSpec:
    """A service that runs until it is told to stop."""
    code = str(Path(__file__).parent / "lone_service.py")
    command = (sys.executable, code, address, "run", str(directory / "drained"))
    return ChildSpec("lone", command, directory / "lone.log", address)


async def test_a_child_that_stands_still_is_killed_and_started_again(
    tmp_path: Path, looks: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    lone = lone_service(tmp_path, f"unix:{tmp_path}/lone")
    watched = Supervisor([lone], JsonlTracker(tmp_path / "lives.jsonl"), hung_s=0.6)
    watched.start()
    await until(lambda: True in looks)

    os.kill(pid_of(tmp_path), signal.SIGSTOP)
    await until(lambda: len(deaths(tmp_path)) == 1)
    looks.clear()
    await until(lambda: True in looks)
    await watched.drain(grace_s=20)

    (death,) = deaths(tmp_path)
    assert (death["signal"], death["hung"], death["memory_kill"]) == ("SIGKILL", 1, "no")
    assert death["last_rpc"] == ""  # it was asked for its health, and for nothing else
    assert "lone ended with signal SIGKILL because it hung" in caplog.text
    assert (tmp_path / "drained").exists()


async def test_a_child_that_has_not_answered_yet_is_starting(
    tmp_path: Path, looks: list[bool]
) -> None:
    def seen() -> None:
        pytest.fail("nobody answered")

    waiting = asyncio.ensure_future(liveness.until_hung(f"unix:{tmp_path}/lone", 0.05, seen))

    await until(lambda: len(looks) > 3 * liveness._LOOKS)

    assert not waiting.done()
    waiting.cancel()


async def test_a_supervisor_that_stood_still_holds_nobody_for_silent(
    tmp_path: Path, looks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_LOOKS", 3)
    watched = Supervisor(
        [lone_service(tmp_path, f"unix:{tmp_path}/lone")],
        JsonlTracker(tmp_path / "lives.jsonl"),
        hung_s=1.5,
    )
    watched.start()
    await until(lambda: True in looks)

    time.sleep(2.0)  # noqa: ASYNC251, the whole process stands still
    looks.clear()
    await until(lambda: looks.count(True) == 2)
    await watched.drain(grace_s=20)

    assert deaths(tmp_path) == []


@pytest.mark.parametrize(
    ("code", "sent_by_us", "before", "now", "expected"),
    [
        pytest.param(-9, False, 3, 4, "yes", id="the-counter-rose"),
        pytest.param(-9, False, 3, 3, "no", id="the-counter-stood"),
        pytest.param(-9, False, None, None, "unknown", id="no-counter"),
        pytest.param(-9, True, 3, 4, "no", id="our-own-signal"),
        pytest.param(1, False, 3, 4, "no", id="it-ended-itself"),
    ],
)
def test_a_kill_for_memory_is_told_by_the_control_groups_counter(
    code: int, sent_by_us: bool, before: int | None, now: int | None, expected: str
) -> None:
    assert memory_kill(code, sent_by_us=sent_by_us, before=before, now=now) == expected


def test_the_counter_is_read_of_either_version_of_control_groups(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 8\noom 1\noom_kill 2\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")

    assert _counter(tmp_path / "absent", tmp_path / "memory.events") == 2
    assert _counter(tmp_path / "memory.oom_control") == 5
    assert _counter(tmp_path / "absent") is None


WATCH = """
import os, pathlib, sys, time
os.read(int(os.environ["TREADLE_SUPERVISOR_FD"]), 1)
time.sleep(float(sys.argv[2]))
with open(sys.argv[1], "a") as order: order.write(sys.argv[3])
"""

SUPERVISE = """
import asyncio, os, pathlib, signal, sys
from treadle_runtime.supervisor import ChildSpec, Supervisor
from treadle_runtime.tracker import JsonlTracker

async def main():
    here = pathlib.Path(sys.argv[1])
    specs = [
        ChildSpec(name, (sys.executable, "-c", sys.argv[2], here / "o", wait, name), here / name)
        for name, wait in (("a", "0.4"), ("b", "0.2"), ("c", "0"))
    ]
    Supervisor(specs, JsonlTracker(here / "lives.jsonl")).start()
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
