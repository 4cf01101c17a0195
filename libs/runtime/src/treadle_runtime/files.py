"""Files that are either whole and durable, or not there; and locks between processes."""

import fcntl
import os
from pathlib import Path
from tempfile import NamedTemporaryFile


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


def hold_lock(path: Path) -> int:
    """Takes an exclusive lock that ends with this process; returns its descriptor.

    Raises:
        LockHeldError: another process holds it.
    """
    descriptor = open_lock(path)
    while not try_lock(descriptor):
        if is_locked(path):
            os.close(descriptor)
            raise LockHeldError(f"{path} is held by another process")
        # Somebody who looked had it, shared, for an instant.
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether a live process holds the lock; False where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def open_lock(path: Path) -> int:
    """Opens the file of a lock, without taking it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def try_lock(descriptor: int) -> bool:
    """Whether the lock is ours now; it ends with this process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
