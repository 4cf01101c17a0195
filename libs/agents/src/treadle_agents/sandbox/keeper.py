"""Keeps one box: runs inside its outer wall, and starts every command behind an inner one.

A program of its own, of the standard library alone, which bubblewrap starts with the source of
this file. It holds the box's writable folders; commands see neither it nor its control socket,
whose number is its only argument. Requests and answers are datagrams of JSON; descriptors travel
with requests.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

SCRATCH = "/run/box"
WORK = f"{SCRATCH}/work"
HOME = "/home/agent"
"""The work folder, as commands see it."""
NOSUID, NODEV, NOEXEC = 2, 4, 8  # of mount(2)
UID = 1000
"""Who a command is, to itself."""
WATCH_S = 0.05
"""Seconds between two looks at the memory of a command."""
MIB = 1024 * 1024
STACK = 8 * MIB
"""What a thread reserves, and hardly ever uses."""


class Keeper:
    """The box, and the command that runs in it."""

    def __init__(self, control: socket.socket, settings: dict[str, Any]) -> None:
        """Makes the writable folders, of one quota together."""
        self._control = control
        self._settings = settings
        self._limits: dict[str, Any] = settings["limits"]
        self._user: dict[str, Any] = {}
        self._woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _heard)
        # A view of processes with no part masked: without, the inner wall could have none.
        _mount(b"proc", b"/proc", NOSUID | NODEV | NOEXEC, b"")
        quota = f"size={self._limits['scratch_mb']}m,nr_inodes={self._limits['files']},mode=755"
        _mount(b"tmpfs", SCRATCH.encode(), NOSUID | NODEV, quota.encode())
        owner = settings["user"]
        for name in ("work", "tmp", "shm"):
            Path(SCRATCH, name).mkdir()
            if owner is not None:
                os.chown(f"{SCRATCH}/{name}", owner, owner)
        Path("/etc/passwd").write_text(f"agent:x:{UID}:{UID}::{HOME}:/bin/sh\n", encoding="utf-8")
        Path("/etc/group").write_text(f"agent:x:{UID}:\n", encoding="utf-8")
        if owner is not None:
            # Limits of a process are set by who has its real user.
            os.setgroups([])
            os.setresgid(owner, 0, 0)
            os.setresuid(owner, 0, 0)
            self._user = {"user": owner, "group": owner, "extra_groups": []}

    def serve(self) -> None:
        """Answers requests until the other side closes."""
        while True:
            text, descriptors, _, _ = socket.recv_fds(self._control, MIB, 3)
            if not text:
                return
            asked: dict[str, Any] = json.loads(text)
            try:
                if asked["say"] == "run":
                    told = self.run(asked, descriptors)
                elif asked["say"] == "write":
                    put(WORK, asked["name"], descriptors[0], self._user.get("user", -1))
                    told = {}
                elif asked["say"] == "read":
                    take(WORK, asked["name"], asked["most"], descriptors[0])
                    told = {}
                else:  # it came when the command had ended
                    continue
            except OSError as error:
                told = {"error": error.strerror or str(error)}
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            self._control.send(json.dumps(told).encode())

    def run(self, asked: dict[str, Any], streams: list[int]) -> dict[str, Any]:
        """Runs a command to its end, or until it is to be killed; leaves no process."""
        inner = self._start(asked, streams)
        for stream in streams:
            os.close(stream)
        streams.clear()
        why = self._follow(inner)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # whatever is in this box but its first process and us
        status = inner.wait()
        while any(self._others()):
            time.sleep(0.001)
        return {"status": 128 + signal.SIGKILL if why else status, "why": why}

    def _start(self, asked: dict[str, Any], streams: list[int]) -> "subprocess.Popen[Any]":
        """Starts the inner wall, and has it wait until the limits hold."""
        told, tell = os.pipe()
        held, hold = os.pipe()
        filtered, feed = os.pipe()
        os.write(feed, bytes.fromhex(self._settings["filter"]))
        os.close(feed)
        wall = [self._settings["program"], *_WALL, "--seccomp", str(filtered)]
        wall += ["--info-fd", str(tell), "--block-fd", str(held)]
        for variable, value in asked["environment"].items():
            wall += ["--setenv", variable, value]
        with os.fdopen(told) as info, os.fdopen(hold, "wb", 0) as release:
            try:
                inner = subprocess.Popen(  # noqa: S603, behind the wall
                    [*wall, "--", *asked["command"]],
                    stdin=streams[0],
                    stdout=streams[1],
                    stderr=streams[2],
                    pass_fds=(tell, held, filtered),
                    **self._user,
                )
            finally:
                for end in (tell, held, filtered):
                    os.close(end)
            with contextlib.suppress(ValueError):  # the wall could not be built, and says so
                self._limit(json.loads(info.read())["child-pid"])
                release.write(b"!")
        return inner

    def _limit(self, pid: int) -> None:
        memory = self._limits["memory_mb"] * MIB
        for kind, value in (
            (resource.RLIMIT_NPROC, self._limits["processes"] + 1),  # the wall's own
            (resource.RLIMIT_DATA, memory + self._limits["processes"] * STACK),
            (resource.RLIMIT_NOFILE, 1024),
            (resource.RLIMIT_MEMLOCK, MIB),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.prlimit(pid, kind)[1]
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.prlimit(pid, kind, (bound, bound))

    def _follow(self, inner: "subprocess.Popen[Any]") -> str:
        """Returns why the command is to be killed; nothing where it has ended."""
        while inner.poll() is None:
            ready, _, _ = select.select([self._woken, self._control], [], [], WATCH_S)
            if self._woken in ready:
                os.read(self._woken, 4096)
            if self._control in ready:
                self._control.recv(MIB)
                return "told"
            if self._memory() > self._limits["memory_mb"] * MIB:
                return "memory"
        return ""

    def _memory(self) -> int:
        """Bytes that the processes of the command hold; what they share counts once."""
        held = sum(map(_resident, self._others()))
        if held > self._limits["memory_mb"] * MIB:
            return sum(map(_proportional, self._others()))
        return held

    def _others(self) -> Iterator[Path]:
        """The processes of commands."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (1, os.getpid()):
                yield entry


_WALL = (
    *("--unshare-user", "--disable-userns", "--unshare-pid", "--unshare-ipc", "--unshare-uts"),
    *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
    *("--uid", str(UID), "--gid", str(UID), "--hostname", "box"),
    *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"),
    *("--bind", f"{SCRATCH}/shm", "/dev/shm", "--remount-ro", "/dev"),  # noqa: S108
    *("--bind", WORK, HOME, "--bind", f"{SCRATCH}/tmp", "/tmp"),  # noqa: S108
    *("--tmpfs", SCRATCH, "--remount-ro", SCRATCH, "--chdir", HOME, "--clearenv"),
)
"""Of a command: namespaces of its own, nothing writable but the box's folders."""


def _heard(number: int, frame: FrameType | None) -> None:
    """A signal that only has to wake."""


def _mount(kind: bytes, folder: bytes, flags: int, options: bytes) -> None:
    if ctypes.CDLL(None, use_errno=True).mount(kind, folder, kind, flags, options):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), folder.decode())


def put(root: str, name: str, source: int, owner: int = -1) -> None:
    """Copies `source` to a fresh file below `root` that replaces what was there.

    It and the folders made above it are of user `owner`; no link is followed. Raises OSError.
    """
    *folders, last = name.split("/")
    with _folder(root, folders, owner=owner, make=True) as folder:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(last, dir_fd=folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(last, flags, 0o644, dir_fd=folder), "wb", 0) as file:
            os.fchown(file.fileno(), owner, owner)
            while piece := os.read(source, MIB):
                file.write(piece)


def take(root: str, name: str, most: int, target: int) -> None:
    """Copies a regular file below `root` to `target`, at most one byte more than `most`.

    No link is followed. Raises OSError where there is none.
    """
    *folders, last = name.split("/")
    with _folder(root, folders) as folder:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(last, flags, dir_fd=folder), "rb", 0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "no regular file")
            left = most + 1
            while left and (piece := file.read(min(left, MIB))):
                left -= os.write(target, piece)


@contextlib.contextmanager
def _folder(root: str, names: list[str], *, owner: int = -1, make: bool = False) -> Generator[int]:
    """A descriptor of a folder below `root`; made for `owner`, where asked and not there."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with contextlib.ExitStack() as opened:
        folder = os.open(root, flags)
        opened.callback(os.close, folder)
        for name in names:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=folder)
                    os.chown(name, owner, owner, dir_fd=folder, follow_symlinks=False)
            folder = os.open(name, flags, dir_fd=folder)
            opened.callback(os.close, folder)
        yield folder


def _resident(process: Path) -> int:
    """Bytes of memory that a process holds, without what is of files."""
    fields = _fields(process / "status")
    return fields.get("RssAnon", 0) + fields.get("RssShmem", 0)


def _proportional(process: Path) -> int:
    """The same, where what processes share is shared out among them."""
    fields = _fields(process / "smaps_rollup")
    return fields.get("Pss_Anon", 0) + fields.get("Pss_Shmem", 0)


def _fields(file: Path) -> dict[str, int]:
    """Sizes in a file of a process, in bytes; none where it has ended."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESRCH):
            return {}
        raise
    parts = [line.split() for line in lines if line.endswith(" kB")]
    return {part[0].rstrip(":"): int(part[1]) * 1024 for part in parts}


def main() -> None:
    """Keeps the box; see the module."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    try:
        keeper = Keeper(control, json.loads(control.recv(MIB)))
    except OSError as error:
        control.send(json.dumps({"error": str(error)}).encode())
        return
    control.send(json.dumps({}).encode())
    keeper.serve()


if __name__ == "__main__":
    main()
