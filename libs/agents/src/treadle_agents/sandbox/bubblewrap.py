"""Sandbox by bubblewrap: namespaces, limits and a filter of system calls, on Linux.

Two walls, one in the other. Behind the outer one a keeper holds the box's folders and its
processes; behind the inner one every command runs with a user, process and mount namespace of its
own, so that it sees neither the keeper nor what other commands left. Started by root, commands run
as another user, since root has no limit on processes.
"""

import asyncio
import contextlib
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from treadle_agents.processes import Cut, Ended
from treadle_agents.processes.regardless import regardless
from treadle_agents.processes.streams import Streams
from treadle_agents.sandbox import seccomp
from treadle_agents.sandbox.asked import (
    MAX_COMMAND,
    check_name,
    checked,
    content_of,
    in_memory,
    refused,
)
from treadle_agents.sandbox.control_group import ControlGroup, delegated
from treadle_agents.sandbox.ports import (
    MAX_FILE,
    NOTHING,
    BoxLostError,
    Limits,
    SandboxMissingError,
)
from treadle_core.errors import InvalidFieldError

START_S = 60.0
"""Most seconds until a box is there; some milliseconds on a machine that is not overloaded."""
KILL_S = 60.0
"""Most seconds until all of a killed command is gone."""
CLOSE_S = 10.0
"""Seconds that a box has for ending by itself."""
ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "PATH": f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/home/agent",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",  # noqa: S108, of the box
    }
)
"""What every command sees."""
_KEEPER = Path(__file__).with_name("keeper.py")
_NOBODY = 65534
"""User of commands where root starts them."""
_CAPABILITIES = ("SYS_ADMIN", "SETUID", "SETGID", "SETFCAP", "KILL", "CHOWN", "DAC_OVERRIDE")
"""What the keeper needs, in the namespace of its user."""
_WALL = (
    *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
    *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"),
    *(part for name in _CAPABILITIES for part in ("--cap-add", f"CAP_{name}")),
)
_HIDING = ("/home/agent", "/run/box", "/tmp", "/proc", "/dev")  # noqa: S108, of the box
_TAIL = 600


@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """Sandbox plugin `bubblewrap`: no network, nothing writable but the box's folders.

    Commands see `/usr`, this Python without its packages, and what is `readable`; nothing else of
    the host. The work folder is `/home/agent`; `/tmp` and `/dev/shm` share its quota.
    """

    readable: Sequence[str] = ()
    """More folders of the host that commands may read: absolute, as they are called here."""
    program: str = "bwrap"
    """Where bubblewrap is."""
    control_group: str = ""
    """A delegated folder of cgroup v2, below which each box has its group; by default this
    process's own, if that is one. Without, limits of processes and a watch over their sum hold."""

    @asynccontextmanager
    async def open(self, limits: Limits = Limits()) -> AsyncGenerator["BubblewrapBox"]:  # noqa: B008
        """As Sandbox.open."""
        box = await BubblewrapBox.start(self, limits)
        try:
            yield box
        finally:
            await regardless(box.close())

    def command(self, control: int) -> list[str]:
        """The outer wall around a keeper whose control socket has the number `control`."""
        program = shutil.which(self.program)
        if program is None:
            raise _missing(f"there is no {self.program}; Debian's package is bubblewrap")
        wall = [program, *_WALL, *(() if _root() else ("--unshare-user", "--uid", "0"))]
        wall += [*(() if _root() else ("--gid", "0")), *_view(self.readable), "--"]
        python = f"{sys.base_prefix}/bin/python3.{sys.version_info.minor}"
        return [*wall, python, "-I", "-S", "-c", _KEEPER.read_text("utf-8"), str(control)]

    def settings(self, limits: Limits) -> dict[str, Any]:
        """What the keeper is told."""
        machine = platform.machine()
        if machine not in seccomp.MACHINES:
            raise _missing(f"no filter of system calls for {machine}")
        return {
            "limits": asdict(limits),
            "user": _NOBODY if _root() else None,
            "filter": seccomp.program(machine).hex(),
            "program": shutil.which(self.program),
        }


class BubblewrapBox:
    """Box behind two walls. Made by `start`; the caller closes it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        control: socket.socket,
        limits: Limits,
        group: ControlGroup | None,
    ) -> None:
        self._process = process
        self._control = control
        self._limits = limits
        self._group = group
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def start(cls, sandbox: Bubblewrap, limits: Limits) -> "BubblewrapBox":
        """A fresh box; raises SandboxMissingError with what bubblewrap says."""
        settings = sandbox.settings(limits)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(0)
        group = None
        with theirs:
            try:
                command = sandbox.command(theirs.fileno())
                if above := sandbox.control_group or delegated():
                    group = ControlGroup(Path(above), limits)
                    command = group.entered(command)
                process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                    env={},
                )
            except BaseException:
                ours.close()
                if group is not None:
                    await regardless(group.close())
                raise
        box = cls(process, ours, limits, group)
        try:
            await box._prove(settings)
        except BaseException:
            await regardless(box.close())
            raise
        return box

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] = NOTHING,
        given: bytes = b"",
        seconds: float | None = None,
    ) -> Ended:
        """As Box.run."""
        request = {"say": "run"} | checked(command, {**ENVIRONMENT, **environment})
        started = self._loop.time()
        async with self._turn:
            streams, theirs = await Streams.open(given, self._limits.output_bytes)
            kills = self._memory_kills()
            try:
                try:
                    answer = self._ask(request, theirs)
                finally:
                    for end in theirs:
                        os.close(end)
                try:
                    cut = await streams.watch(answer, seconds or self._limits.seconds)
                finally:
                    told = await regardless(self._over(answer))
                output, errors = await streams.drained()
            finally:
                streams.close()
        if "error" in told:
            raise BoxLostError(f"the box cannot start commands any more: {told['error']}")
        if told["why"] == Cut.MEMORY or self._memory_kills() > kills:
            cut = Cut.MEMORY
        return Ended(told["status"], output, errors, self._loop.time() - started, cut)

    async def write(self, files: Mapping[str, bytes]) -> None:
        """As Box.write."""
        for name in files:
            check_name(name)
        for name, content in files.items():
            async with self._turn:
                with in_memory(content) as source:
                    answer = self._ask({"say": "write", "name": name}, [source.fileno()])
                told = await regardless(answer)
            if "error" in told:
                raise refused(name, told["error"])

    async def read(self, name: str, *, most: int = MAX_FILE) -> bytes:
        """As Box.read."""
        check_name(name)
        with in_memory(b"") as target:
            async with self._turn:
                asked = {"say": "read", "name": name, "most": most}
                told = await regardless(self._ask(asked, [target.fileno()]))
            if "error" in told:
                raise refused(name, told["error"])
            return content_of(name, target, most)

    async def close(self) -> str:
        """Ends the box with all that is in it; returns the last that the walls said."""
        self._control.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                _, errors = await self._process.communicate()
        except TimeoutError:
            self._process.kill()
            _, errors = await self._process.communicate()
        if self._group is not None:
            group, self._group = self._group, None
            await group.close()
        return errors.decode(errors="replace").strip()[-_TAIL:]

    async def _prove(self, settings: dict[str, Any]) -> None:
        """Waits for the keeper, and runs a first command, so that both walls are known to stand."""
        try:
            async with asyncio.timeout(START_S):
                await self._loop.sock_sendall(self._control, json.dumps(settings).encode())
                told = await self._answer()
            if "error" in told:
                raise _missing(told["error"])
            first = await self.run(["true"], seconds=START_S)
        except TimeoutError as error:
            raise _missing(f"no box within {START_S:g} s") from error
        except (BoxLostError, OSError) as error:
            raise _missing(await regardless(self.close()) or str(error)) from error
        if not first.ok:
            why = first.errors.decode(errors="replace").strip()[-_TAIL:]
            raise _missing(why or f"a first command ended with status {first.status}")

    def _memory_kills(self) -> int:
        return 0 if self._group is None else self._group.memory_kills()

    def _ask(
        self, request: dict[str, Any], descriptors: Sequence[int]
    ) -> "asyncio.Task[dict[str, Any]]":
        """Sends a request; returns its answer to come."""
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], list(descriptors))
        except OSError as error:
            raise BoxLostError(f"the box has ended: {error.strerror}") from error
        return asyncio.create_task(self._answer())

    async def _answer(self) -> dict[str, Any]:
        try:
            told = await self._loop.sock_recv(self._control, MAX_COMMAND)
        except ConnectionError:
            told = b""
        if not told:
            raise BoxLostError("the box ended before it was closed")
        return json.loads(told)

    async def _over(self, answer: "asyncio.Task[dict[str, Any]]") -> dict[str, Any]:
        """The answer to a command that is to be over: killed, if it still runs."""
        if not answer.done():
            with contextlib.suppress(OSError):
                await self._loop.sock_sendall(self._control, b'{"say": "kill"}')
            try:
                async with asyncio.timeout(KILL_S):
                    await asyncio.wait([answer])
            except TimeoutError as error:
                self._process.kill()
                raise BoxLostError(f"a command was not gone {KILL_S:g} s after its end") from error
        return answer.result()


def _root() -> bool:
    return os.geteuid() == 0


def _view(readable: Sequence[str]) -> list[str]:
    """What of the host a box shows."""
    view: list[str] = []
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        folder = Path("/", name)
        if folder.is_symlink():
            view += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            view += ["--ro-bind", str(folder), str(folder)]
    for name in ("ld.so.cache", "alternatives"):
        view += [
            "--perms",
            "0755",
            "--dir",
            "/etc",
            "--ro-bind-try",
            f"/etc/{name}",
            f"/etc/{name}",
        ]
    for folder in (Path(sys.base_prefix), *map(Path, readable)):
        if not folder.is_absolute() or not folder.is_dir() or _hidden(folder):
            limit = f"absolute folders outside of {', '.join(_HIDING)}"
            raise InvalidFieldError("readable", limit=limit, value=folder)
        if not folder.is_relative_to("/usr"):
            for above in reversed(folder.parents[:-1]):
                view += ["--perms", "0755", "--dir", str(above)]
            view += ["--ro-bind", str(folder), str(folder)]
    for folder in ("/run/box", "/home/agent", "/tmp"):  # noqa: S108, of the box
        view += ["--perms", "0755", "--dir", folder]
    return [*view, "--proc", "/proc", "--dev", "/dev", "--chdir", "/"]


def _hidden(folder: Path) -> bool:
    """Whether what boxes have of their own would hide a folder of the host."""
    return any(folder.is_relative_to(hiding) for hiding in _HIDING)


def _missing(why: str) -> SandboxMissingError:
    return SandboxMissingError(
        f"sandbox bubblewrap: {why}", field="sandbox", limit="bubblewrap", value=why
    )
