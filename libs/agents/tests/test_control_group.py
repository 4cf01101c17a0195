"""Control groups: the kernel counts a whole box. Skipped where none is delegated to the tests."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from treadle_agents.processes import Cut, run_tree
from treadle_agents.sandbox import Limits, SandboxMissingError
from treadle_agents.sandbox.bubblewrap import Bubblewrap
from treadle_agents.sandbox.control_group import ControlGroup, delegated

pytestmark = pytest.mark.processes

LIMITS = Limits(processes=8, memory_mb=32, scratch_mb=8, files=100)
TAKES = "held = b'x' * (300 * 2**20)"
FORKS = """
import os, signal
made = 0
try:
    while made < 100:
        if not os.fork():
            signal.pause()
        made += 1
except OSError:
    print(made)
"""
HIDES = """
import os, socket
children = 0
while children < 4 and os.fork():
    children += 1
pairs = [socket.socketpair() for _ in range(400)]
for one, _ in pairs:
    one.setblocking(False)
    try:
        while True:
            one.send(bytes(4096))
    except BlockingIOError:
        pass
for _ in range(children):
    os.wait()
"""
"""Fills buffers of sockets, in five processes that are small themselves."""


@pytest.fixture
def above() -> Path:
    found = delegated()
    if found is None:
        pytest.skip("no control group of version 2 is delegated to this process")
    return found


async def test_a_group_bounds_memory_and_processes_of_all_that_enters(above: Path) -> None:
    group = ControlGroup(above, LIMITS)
    try:
        run = {"environment": {}, "folder": Path("/"), "deadline_s": 120.0}
        taken = await run_tree(group.entered([sys.executable, "-c", TAKES]), **run)
        assert (taken.status, group.memory_kills()) == (128 + signal.SIGKILL, 1)
        forked = await run_tree(group.entered([sys.executable, "-c", FORKS]), **run)
        assert 1 <= int(forked.output) <= LIMITS.processes + 5
    finally:
        await group.close()
    assert not group.folder.exists()


async def test_closing_a_group_kills_what_is_in_it(above: Path) -> None:
    group = ControlGroup(above, LIMITS)
    process = await asyncio.create_subprocess_exec(*group.entered(["sleep", "600"]))
    while not (group.folder / "cgroup.procs").read_text():  # noqa: ASYNC110, of the kernel
        await asyncio.sleep(0.01)
    await group.close()
    assert await process.wait() == -signal.SIGKILL


async def test_memory_that_no_process_holds_counts_for_the_box(above: Path) -> None:
    limits = Limits(processes=8, memory_mb=64, scratch_mb=8, seconds=120)
    boxes = Bubblewrap(control_group=str(above))
    async with boxes.open(limits) as box:
        ended = await box.run(["python3", "-c", HIDES])
        assert ended.cut is Cut.MEMORY
        (folder,) = above.glob("box-*")  # noqa: ASYNC240, of the kernel
        assert "oom_kill 0" not in (folder / "memory.events").read_text()
        assert (await box.run(["true"])).ok
    assert not folder.exists()


async def test_a_folder_that_is_no_delegated_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxMissingError, match="no control group below"):
        async with Bubblewrap(control_group=str(tmp_path / "none")).open():
            pass
