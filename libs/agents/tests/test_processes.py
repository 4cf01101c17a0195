"""A command as a process tree: it is drained, bounded, and wholly gone when it is over."""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from treadle_agents.processes import Cut, Ended, TreeLostError, run_tree
from treadle_core.errors import InvalidFieldError

pytestmark = pytest.mark.processes

LEAVES = """
import os, signal, sys
marker, ready = sys.argv[1:]
if not os.fork():
    os.setsid()
    if not os.fork():
        os.setsid()
        os.closerange(0, 1024)
        open(ready, "w").close()
        signal.pause()
    os._exit(0)
while not os.path.exists(ready):
    pass
"""
"""Leaves a process that is nobody's child and leads a session of its own."""
PLAYS = """
import asyncio, pathlib, sys
from treadle_agents.processes import run_tree
asyncio.run(run_tree(sys.argv[1:], environment={}, folder=pathlib.Path("/"), deadline_s=600))
"""


async def run(*command: str, folder: Path = Path("/"), seconds: float = 120, **more) -> Ended:
    environment = {"PATH": os.environ["PATH"], "ONLY": "this"}
    return await run_tree(
        command, environment=environment, folder=folder, deadline_s=seconds, **more
    )


def running(marker: str) -> list[int]:
    """Processes with `marker` as an argument."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if entry.name.isdigit() and marker.encode() in arguments:
            found.append(int(entry.name))
    return found


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110, of another process
            await asyncio.sleep(0.01)


def leaves(folder: Path) -> tuple[str, Path, Sequence[str]]:
    """A marker, the file that says that the process is there, and the command that leaves it."""
    marker, ready = uuid.uuid4().hex, folder / "ready"
    return marker, ready, (sys.executable, "-c", LEAVES, marker, str(ready))


async def test_a_command_is_fed_and_says_what_it_has_to_say(tmp_path: Path) -> None:
    ended = await run("sh", "-c", "cat; pwd; echo wrong >&2; exit 3", folder=tmp_path, given=b"a\n")
    assert (ended.status, ended.cut, ended.ok) == (3, None, False)
    assert (ended.output, ended.errors) == (f"a\n{tmp_path}\n".encode(), b"wrong\n")
    assert (await run("true")).ok


async def test_a_command_sees_the_environment_that_it_is_given_and_no_other() -> None:
    ended = await run(sys.executable, "-c", "import os; print(sorted(os.environ))")
    assert ended.output in (b"['ONLY', 'PATH']\n", b"['LC_CTYPE', 'ONLY', 'PATH']\n")


async def test_more_output_than_allowed_ends_a_command_and_no_more_is_kept() -> None:
    ended = await run("sh", "-c", "yes >&2 & yes", max_output=10_000)
    assert (ended.cut, ended.status, ended.ok) == (Cut.OUTPUT, 137, False)
    assert len(ended.output) + len(ended.errors) == 10_000


async def test_as_much_output_as_allowed_is_no_reason_to_end_a_command() -> None:
    ended = await run("sh", "-c", "head -c 10000 /dev/zero", max_output=10_000)
    assert (ended.cut, len(ended.output)) == (None, 10_000)


async def test_a_command_that_does_not_heed_a_signal_is_killed_at_its_deadline() -> None:
    ended = await run("sh", "-c", "trap '' TERM INT HUP; while :; do sleep 1; done", seconds=0.3)
    assert (ended.cut, ended.status) == (Cut.DEADLINE, 137)
    assert ended.seconds >= 0.3


async def test_what_left_its_session_and_its_parent_ends_with_the_command(tmp_path: Path) -> None:
    marker, ready, command = leaves(tmp_path)
    assert (await run(*command)).ok
    assert ready.exists()
    assert running(marker) == []


async def test_what_left_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    marker, ready, command = leaves(tmp_path)
    ended = await run("sh", "-c", '"$@"; yes', "sh", *command, max_output=100)
    assert ended.cut is Cut.OUTPUT
    assert ready.exists()
    assert running(marker) == []


async def test_a_cancelled_call_ends_once_nothing_of_its_command_is_left(tmp_path: Path) -> None:
    marker, ready, command = leaves(tmp_path)
    call = asyncio.create_task(run("sh", "-c", '"$@"; sleep 600', "sh", *command))
    await until(ready.exists)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert running(marker) == []


async def test_a_command_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    marker, ready, command = leaves(tmp_path)
    asker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PLAYS, "/bin/sh", "-c", '"$@"; exec sleep 600', "sh", *command)
    )
    await until(ready.exists)
    asker.kill()
    await asker.wait()
    await until(lambda: not running(marker))


async def test_a_command_that_kills_its_watcher_is_told_of() -> None:
    with pytest.raises(TreeLostError, match="may still run"):
        await run("sh", "-c", f"kill -{signal.SIGKILL:d} $PPID")


async def test_children_that_end_meanwhile_are_reaped_and_change_nothing() -> None:
    ended = await run("sh", "-c", "for i in 1 2 3; do (true &); done; sleep 0.1; exit 4")
    assert ended.status == 4


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        pytest.param("/no/such/program", "/", id="no-program"),
        pytest.param("true", "/no/such/folder", id="no-folder"),
        pytest.param("/etc", "/", id="a-folder"),
    ],
)
async def test_what_cannot_be_started_is_refused(command: str, folder: str) -> None:
    with pytest.raises(InvalidFieldError, match="command: expected one that starts"):
        await run(command, folder=Path(folder))


async def test_a_command_that_dies_of_a_signal_says_which() -> None:
    assert (await run("sh", "-c", "kill -SEGV $$")).status == 128 + signal.SIGSEGV
