"""Runs one command and kills all that comes of it, also what left its session.

usage: reaper.py FD COMMAND...

A process of its own, of the standard library alone. It adopts what its descendants orphan, so that
none gets out of its sight. Everything is killed when the command itself has ended, or when the
other side closes its half of the socket FD. Then one JSON object is written to it: `status` of the
command, `error` where it could not be started, `left` with what may not be killed.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

_SET_CHILD_SUBREAPER = 36  # of prctl(2)


class Reaper:
    """The command, and the statuses of all that ended."""

    def __init__(self, command: list[str]) -> None:
        """Starts the command; raises OSError where that fails."""
        self._woken, waker = os.pipe()
        os.set_blocking(waker, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _heard)
        heeded = [signal.SIGPIPE, signal.SIGXFSZ]  # which Python ignores
        self._pid = os.posix_spawnp(command[0], command, os.environ, setsigdef=heeded)
        self._statuses: dict[int, int] = {}

    @property
    def status(self) -> int | None:
        """Of the command; None while it runs."""
        return self._statuses.get(self._pid)

    def follow(self, control: socket.socket) -> None:
        """Returns when the command has ended or the other side has closed."""
        self._reap(os.WNOHANG)
        while self.status is None:
            ready, _, _ = select.select([self._woken, control], [], [])
            if control in ready:
                return
            os.read(self._woken, 4096)
            self._reap(os.WNOHANG)

    def kill(self) -> list[int]:
        """Kills every descendant, and returns those that may not be killed.

        Each is stopped first, until a look around finds no new one: what is stopped starts no
        others.
        """
        seen: set[int] = set()
        while found := descendants() - seen:
            seen |= found
            for pid in found:
                _send(pid, signal.SIGSTOP)
        left: set[int] = set()
        while alive := descendants() - left:
            left |= {pid for pid in alive if not _send(pid, signal.SIGKILL)}
            if alive - left:
                self._reap(0)
        return sorted(left)

    def _reap(self, flags: int) -> None:
        """Takes the statuses of children that ended; waits for the first unless WNOHANG is set."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitpid(-1, flags):
                pid, status = ended
                if not pid:
                    return
                code = os.waitstatus_to_exitcode(status)
                self._statuses[pid] = code if code >= 0 else 128 - code
                flags = os.WNOHANG


def descendants() -> set[int]:
    """All processes below this one, those that ended and wait for this one to hear included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has ended meanwhile
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            parent = int(stat.rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    below = [os.getpid()]
    while below:
        fresh = [child for child in children.get(below.pop(), []) if child not in found]
        found.update(fresh)
        below += fresh
    return found


def _heard(number: int, frame: FrameType | None) -> None:
    """A signal that only has to wake."""


def _send(pid: int, number: int) -> bool:
    """Whether the signal could be sent, or need not be."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return True


def main() -> None:
    """Reaps; see the module."""
    with socket.socket(fileno=int(sys.argv[1])) as control:
        control.set_inheritable(False)
        if ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")
        try:
            reaper = Reaper(sys.argv[2:])
        except OSError as error:
            told: dict[str, object] = {"error": f"{sys.argv[2]}: {error.strerror}"}
        else:
            reaper.follow(control)
            told = {"left": reaper.kill(), "status": reaper.status}
        with contextlib.suppress(BrokenPipeError):  # nobody waits any more
            control.sendall(json.dumps(told).encode())


if __name__ == "__main__":
    main()
