"""Files that are either whole and durable, or not there; and locks between processes."""

import asyncio
import fcntl
import os
from pathlib import Path
from tempfile import NamedTemporaryFile

_LOCK_POLL_S = 0.1


class LockHeldError(RuntimeError):
    """Another live process holds a lock."""


def write_durably(path: Path, data: bytes) -> None:
    """Writes aside, fsyncs, renames, fsyncs the directory: durable when it returns."""
    with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        aside = Path(file.name)
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            aside.replace(path)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


async def hold_lock(path: Path, *, wait_s: float) -> int:
    """Takes an exclusive lock that ends with this process; returns its descriptor.

    Raises:
        LockHeldError: another process still holds it after `wait_s` seconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    tries_left = max(1, int(wait_s / _LOCK_POLL_S))
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            tries_left -= 1
            if not tries_left:
                os.close(descriptor)
                raise LockHeldError(f"{path} is held by another process") from error
            await asyncio.sleep(_LOCK_POLL_S)
        else:
            return descriptor
