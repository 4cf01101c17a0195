"""A unix socket's address has one holder; who wants it too stands by, and follows it.

The holder keeps a lock beside the socket and beats in it. A standby takes the lock when the holder
is gone, and ends a holder that is silent: one that is stopped keeps its lock and its connections,
so that its peers would wait for it. What must not be done twice is fenced where it is recorded (by
the writer's and the trainer's epochs), not here.
"""

import asyncio
import contextlib
import logging
import os
import signal
from pathlib import Path

from treadle_runtime.files import open_lock, try_lock

log = logging.getLogger(__name__)

SILENCE_S = 5.0
"""Silence of a holder after which a standby ends it. Measured in the standby's own looks, so that
its own standing still is none of the holder's silence."""

_BEAT_S = 0.5
_LOOK_S = 0.1
_SIZE = 64


class Address:
    """The right to listen at an address, until the process ends."""

    def __init__(self, descriptor: int) -> None:
        """Beats from here on; needs a running event loop."""
        self._descriptor = descriptor
        self._beating = asyncio.ensure_future(self._beat())

    async def _beat(self) -> None:
        pid = os.getpid()
        start, beats = _start_of(pid), 0
        while True:
            beats += 1
            line = f"{pid} {start} {beats}".encode().ljust(_SIZE)
            try:
                os.pwrite(self._descriptor, line, 0)
            except OSError as error:
                log.warning("no room for a sign of life: %s", error)
            await asyncio.sleep(_BEAT_S)


async def hold(path: Path) -> Address:
    """Waits until the lock `path` is ours, however long, and holds it."""
    descriptor = open_lock(path)
    if not try_lock(descriptor):
        log.info("standing by: %s is held", path)
        await _stand_by(descriptor)
    return Address(descriptor)


async def _stand_by(descriptor: int) -> None:
    beat, looks = b"", 0
    while not try_lock(descriptor):
        last, beat = beat, os.pread(descriptor, _SIZE, 0)
        looks = looks + 1 if beat == last else 0
        if looks * _LOOK_S >= SILENCE_S:
            _end(beat)
            looks = 0
        await asyncio.sleep(_LOOK_S)


def _end(beat: bytes) -> None:
    """Kills the process that beat last, if it is that one still and within reach."""
    pid, start, _ = (int(word) for word in beat.split()) if beat.strip() else (0, -1, 0)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        pidfd = -1
    if pidfd < 0 or _start_of(pid) != start:
        log.error("the holder, process %d, is silent and out of reach", pid)
        if pidfd >= 0:
            os.close(pidfd)
        return
    try:
        log.warning("ending process %d, which was silent for %.0f s", pid, SILENCE_S)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except PermissionError as error:
        log.error("process %d cannot be ended: %s", pid, error)  # noqa: TRY400
    finally:
        os.close(pidfd)


def _start_of(pid: int) -> int:
    """Clock ticks from boot to the start of a process, which no other with its id shares."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])
