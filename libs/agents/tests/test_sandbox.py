"""Boxes: what commands may do there, what they may not, and what is left of them."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from treadle_agents.processes import Cut
from treadle_agents.sandbox import Box, BoxLostError, Limits, Sandbox, SandboxMissingError, run_once
from treadle_agents.sandbox.bubblewrap import Bubblewrap
from treadle_agents.sandbox.none import NoSandbox
from treadle_agents.sandbox.probes import PROBES, findings
from treadle_core.errors import InvalidFieldError

pytestmark = pytest.mark.processes

LIMITS = Limits(processes=16, memory_mb=128, scratch_mb=8, files=200, output_bytes=4096, seconds=60)
ROOT = Path(__file__).parents[3]
UNPRIVILEGED = """
import asyncio
from treadle_agents.sandbox import run_once
from treadle_agents.sandbox.bubblewrap import Bubblewrap
bomb = "for i in $(seq 100); do sleep 60 & done"
async def main():
    ended, _ = await run_once(Bubblewrap(), ["sh", "-c", "id -u; " + bomb])
    print(ended.output, ended.errors)
asyncio.run(main())
"""
OPENS = """
import asyncio, sys
from treadle_agents.sandbox.bubblewrap import Bubblewrap
async def main():
    async with Bubblewrap().open() as box:
        await box.run(["sh", "-c", "setsid sleep 600 & sleep 600", sys.argv[1]], seconds=600)
asyncio.run(main())
"""


def running(marker: str, program: str) -> bool:
    """Whether a process has `marker` as an argument, and `program` as its name or any."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            if marker.encode() in arguments and arguments[0].startswith(program.encode()):
                return True
    return False


@pytest.fixture(scope="module")
def bubblewrap() -> Bubblewrap:
    """Skips, with the reason, where this machine cannot have it."""

    async def try_it() -> None:
        async with Bubblewrap().open():
            pass

    try:
        asyncio.run(try_it())
    except SandboxMissingError as error:
        pytest.skip(error.message)
    return Bubblewrap()


@pytest.fixture(params=["bubblewrap", "none"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "none":
        return NoSandbox(trusted=True)
    return request.getfixturevalue("bubblewrap")


@pytest.fixture
async def box(sandbox: Sandbox) -> AsyncIterator[Box]:
    async with sandbox.open(LIMITS) as opened:
        yield opened


@pytest.mark.timeout(1800)  # some thirty boxes, also on a machine that is slow
async def test_every_attempt_to_get_out_fails(bubblewrap: Bubblewrap) -> None:
    found = {each.probe: each.escaped async for each in findings(bubblewrap)}
    assert len(found) >= 20
    assert {probe: how for probe, how in found.items() if how} == {}


async def test_attempts_succeed_where_there_is_no_wall() -> None:
    harmless = ["network_host", "socket_of_host", "socket_without_file", "read_host_file"]
    harmless += ["processes_of_host", "secret_in_environment", "memory_without_owner"]
    assert set(harmless) <= set(PROBES)
    async for found in findings(NoSandbox(trusted=True), harmless):
        assert found.escaped.startswith("escaped: "), found


async def test_commands_run_one_after_another_over_one_folder(box: Box) -> None:
    await box.write({"in/data.txt": b"6*7\n", "go.sh": b"cat in/data.txt > out.txt"})
    first = await box.run(["sh", "go.sh"])
    second = await box.run(["sh", "-c", "cat; cat out.txt; exit 3"], given=b"is ")
    assert (first.ok, second.status, second.output) == (True, 3, b"is 6*7\n")
    assert await box.read("out.txt") == b"6*7\n"


async def test_concurrent_commands_take_turns(box: Box) -> None:
    count = "n=$(cat n || echo 0); echo $((n + 1)) > n"
    await asyncio.gather(*(box.run(["sh", "-c", count]) for _ in range(4)))
    assert await box.read("n") == b"4\n"


async def test_python_is_there_by_its_name(box: Box) -> None:
    ended = await box.run(["python3", "-c", "import sys; print(sys.version_info[:2])"])
    assert ended.output.decode() == f"{sys.version_info[:2]}\n"


async def test_a_command_sees_its_own_variables_and_none_of_ours(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2")
    ended = await box.run(["env"], environment={"MINE": "ä"})
    names = {line.split("=")[0] for line in ended.output.decode().splitlines()}
    assert names - {"PWD"} == {"PATH", "HOME", "LANG", "TMPDIR", "MINE"}


async def test_a_command_is_killed_at_its_deadline_and_the_box_goes_on(box: Box) -> None:
    ended = await box.run(
        ["sh", "-c", "trap '' TERM; echo a; while :; do sleep 1; done"], seconds=1
    )
    assert (ended.cut, ended.status) == (Cut.DEADLINE, 137)
    assert (await box.run(["echo", "on"])).output == b"on\n"


async def test_output_is_bounded_while_it_streams(box: Box) -> None:
    ended = await box.run(["sh", "-c", "yes >&2 & yes"])
    assert ended.cut is Cut.OUTPUT
    assert len(ended.output) + len(ended.errors) == LIMITS.output_bytes


async def test_a_cancelled_command_is_gone_and_the_box_goes_on(box: Box) -> None:
    call = asyncio.create_task(box.run(["sh", "-c", "sleep 600"]))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await box.run(["echo", "on"])).output == b"on\n"


async def test_files_are_replaced_and_links_are_not_followed(box: Box, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    lay = f"ln -s {tmp_path}/mine link; ln -s {tmp_path} folder; mkfifo pipe; mkdir dir"
    await box.run(["sh", "-c", lay])
    for name in ("link", "folder/mine", "pipe", "dir", "none"):
        with pytest.raises(InvalidFieldError, match=rf"name: expected a regular file.*{name}: "):
            await box.read(name)
    with pytest.raises(InvalidFieldError, match="name"):
        await box.write({"folder/planted": b""})
    await box.write({"link": b"replaced", "dir/deep/file": b"new"})
    await box.write({"dir/deep/file": b"newer"})
    assert await box.read("link") == b"replaced"
    assert await box.read("dir/deep/file") == b"newer"
    assert (tmp_path / "mine").read_bytes() == b"mine"
    assert not (tmp_path / "planted").exists()


async def test_a_file_is_as_large_as_was_asked_for_or_refused(box: Box) -> None:
    await box.run(["sh", "-c", "printf 12345 > file; truncate -s 7G file.sparse || true"])
    assert await box.read("file", most=5) == b"12345"
    for name in ("file", "file.sparse"):
        with pytest.raises(InvalidFieldError, match="at most 4 bytes"):
            await box.read(name, most=4)


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../../b", "a//b", ".", "a\0b"])
async def test_a_name_that_leads_out_is_refused(name: str) -> None:
    async with NoSandbox(trusted=True).open() as box:
        with pytest.raises(InvalidFieldError, match="name: expected a path below the folder"):
            await box.read(name)
        with pytest.raises(InvalidFieldError, match="name: expected a path below the folder"):
            await box.write({name: b""})


@pytest.mark.parametrize(
    ("command", "environment"),
    [
        pytest.param([], {}, id="nothing"),
        pytest.param([""], {}, id="no-program"),
        pytest.param("ls", {}, id="a-line"),
        pytest.param(["ls", "a\0b"], {}, id="nul"),
        pytest.param(["ls", 3], {}, id="a-number"),
        pytest.param(["ls"], {"A=B": ""}, id="two-variables"),
        pytest.param(["echo", "x" * 200_000], {}, id="too-long"),
    ],
)
async def test_a_command_that_is_none_is_refused(sandbox: Sandbox, command, environment) -> None:
    async with sandbox.open(LIMITS) as box:
        with pytest.raises(InvalidFieldError, match=r"command|environment"):
            await box.run(command, environment=environment)


async def test_a_command_that_is_not_there_says_so(bubblewrap: Bubblewrap) -> None:
    ended, _ = await run_once(bubblewrap, ["no-such-program"])
    assert not ended.ok
    assert b"no-such-program" in ended.errors


async def test_once_gives_back_the_named_files_that_are_there(sandbox: Sandbox) -> None:
    ended, taken = await run_once(
        sandbox,
        ["sh", "-c", "cat > b; ln -s b c"],
        files={"a": b"1"},
        given=b"2",
        take=("a", "b", "c", "d"),
    )
    assert (ended.ok, taken) == (True, {"a": b"1", "b": b"2"})


async def test_boxes_share_nothing(bubblewrap: Bubblewrap) -> None:
    async with bubblewrap.open() as one, bubblewrap.open() as other:
        await one.write({"mine": b""})
        places = ["/tmp", "/dev/shm"]  # noqa: S108, of the boxes
        await one.run(["touch", *(f"{place}/mine" for place in places)])
        ended = await other.run(["find", ".", *places, "-name", "mine"])
        assert (ended.ok, ended.output) == (True, b"")


async def test_a_full_folder_is_told_and_can_be_emptied(bubblewrap: Bubblewrap) -> None:
    async with bubblewrap.open(LIMITS) as box:
        await box.run(["sh", "-c", "cat /dev/zero > full"])
        with pytest.raises(InvalidFieldError, match="No space left"):
            await box.write({"more": bytes(100_000)})
        assert (await box.run(["rm", "full"])).ok
        await box.write({"more": bytes(100_000)})


@pytest.fixture
def above() -> Iterator[Path]:
    """A folder that every user may read, elsewhere than in /tmp, which a box has of its own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "shown" / "known").mkdir(parents=True)
        (folder / "beside").mkdir()
        yield folder


async def test_commands_read_the_folders_that_they_are_shown(above: Path) -> None:
    shown = above / "shown"
    ended, _ = await run_once(
        Bubblewrap(readable=[str(shown)]),
        ["sh", "-c", f"ls {shown}; ls -d {above}/*; touch {shown}/planted"],
    )
    assert ended.output == f"known\n{shown}\n".encode()
    assert b"Read-only" in ended.errors


@pytest.mark.parametrize("folder", ["relative", "/no/such/folder", "/proc/1", "/dev"])
async def test_a_folder_that_cannot_be_shown_is_refused(folder: str) -> None:
    with pytest.raises(InvalidFieldError, match="readable"):
        async with Bubblewrap(readable=[folder]).open():
            pass


async def test_without_bubblewrap_nothing_runs() -> None:
    with pytest.raises(SandboxMissingError, match="there is no no-such-bwrap"):
        async with Bubblewrap(program="no-such-bwrap").open():
            pass


async def test_what_the_walls_say_when_they_cannot_stand_is_told(tmp_path: Path) -> None:
    program = tmp_path / "bwrap"
    program.write_text(
        "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2; exit 1"
    )
    program.chmod(0o755)
    with pytest.raises(SandboxMissingError, match="No permissions to create new namespace"):
        async with Bubblewrap(program=str(program)).open():
            pass


async def test_an_inner_wall_that_cannot_stand_is_no_command_that_failed(
    bubblewrap: Bubblewrap, tmp_path: Path
) -> None:
    program = tmp_path / "bwrap"  # which stands without, and is not to be found within
    program.write_text('#!/bin/sh\nexec bwrap "$@"')
    program.chmod(0o755)
    with pytest.raises(SandboxMissingError, match="No such file"):
        async with Bubblewrap(program=str(program)).open():
            pass


async def test_a_box_that_ends_under_a_command_is_lost_and_says_so(bubblewrap: Bubblewrap) -> None:
    async with bubblewrap.open() as box:
        call = asyncio.create_task(box.run(["sleep", "600"]))
        await asyncio.sleep(0)
        box._process.kill()
        with pytest.raises(BoxLostError):
            await call
        with pytest.raises(BoxLostError):
            await box.read("file")


async def test_a_box_ends_with_the_process_that_opened_it(bubblewrap: Bubblewrap) -> None:
    marker = uuid.uuid4().hex
    opener = await asyncio.create_subprocess_exec(sys.executable, "-c", OPENS, marker)
    async with asyncio.timeout(60):
        while not running(marker, "sh"):  # noqa: ASYNC110, of another process
            await asyncio.sleep(0.01)
        opener.kill()
        await opener.wait()
        while running(marker, ""):  # noqa: ASYNC110, of another process
            await asyncio.sleep(0.01)


async def test_a_user_who_is_not_root_has_boxes_as_well(bubblewrap: Bubblewrap) -> None:
    python = shutil.which("python3", path="/usr/bin")
    if os.getuid() or python is None:
        pytest.skip("needs root, to become somebody else, and a Python that everybody may run")
    source = f"{ROOT}/libs/agents/src:{ROOT}/libs/core/src"
    done = await asyncio.to_thread(
        subprocess.run,
        [python, "-c", UNPRIVILEGED],
        check=False,
        user=65534,
        group=65534,
        extra_groups=[],
        env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        cwd="/",
    )
    if "requires-python" in done.stderr or "SyntaxError" in done.stderr:
        pytest.skip("the system's Python is too old")
    assert "b'1000\\n'" in done.stdout, done.stderr
    assert "Cannot fork" in done.stdout


def test_a_sandbox_that_isolates_nothing_has_to_be_asked_for() -> None:
    with pytest.raises(InvalidFieldError, match=r"sandbox\.trusted: expected true"):
        NoSandbox()


@pytest.mark.parametrize("field", ["processes", "memory_mb", "scratch_mb", "files", "seconds"])
def test_a_limit_of_nothing_is_none(field: str) -> None:
    with pytest.raises(InvalidFieldError, match=rf"limits\.{field}: expected more than 0, got 0"):
        Limits(**{field: 0})
