"""PayloadStore `files`: content-addressed files below one directory."""

import contextlib
import errno
import os
import tempfile
import time
from pathlib import Path

from treadle_core.errors import PayloadMissingError
from treadle_payloads.store import PayloadReference, PayloadStoreFullError, checked_sha256

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FULL_RETRY_S = 1.0
_ABANDONED_AFTER_S = 3600.0
"""No writer takes this long, so an unfinished file of this age has lost its writer."""


class FileStore:
    """PayloadStore plugin `files`: `directory/ab/abcd...`, one file per payload.

    A file is complete from the moment at which it has its name, so many processes may share the
    directory. Durability is `host`: fsynced on this node before `put` returns.
    """

    def __init__(self, directory: str | Path) -> None:
        """Creates the directories that are missing and drops what killed writers left."""
        self._directory = Path(directory)
        self._unfinished = self._directory / "tmp"
        self._unfinished.mkdir(parents=True, exist_ok=True)
        for prefix in range(256):
            (self._directory / f"{prefix:02x}").mkdir(exist_ok=True)
        _sync_directory(self._directory)
        _sync_directory(self._directory.parent)
        abandoned = time.time() - _ABANDONED_AFTER_S
        for path in self._unfinished.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < abandoned:
                    path.unlink()

    def put(self, data: bytes) -> PayloadReference:
        reference = PayloadReference.of(data)
        path = self._path(reference.sha256)
        try:
            if not _holds(path, data):
                self._write(path, data)
            # On a hit too: the process that renamed the file may not have come to its fsync.
            _sync_directory(path.parent)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise PayloadStoreFullError(
                f"payload store {self._directory}: {error.strerror} for {len(data)} bytes",
                field="payload",
                limit=error.strerror,
                value=len(data),
                retry_after_s=_FULL_RETRY_S,
            ) from error
        return reference

    def get(self, reference: PayloadReference) -> bytes:
        path = self._path(reference.sha256)
        try:
            with path.open("rb") as file:
                reference.check_size(os.fstat(file.fileno()).st_size)
                data = file.read()
        except FileNotFoundError as error:
            raise PayloadMissingError(
                f"payload {reference.sha256} is not in {self._directory}",
                field="sha256",
                value=reference.sha256,
            ) from error
        reference.check(data)
        return data

    def has(self, reference: PayloadReference) -> bool:
        try:
            return self._path(reference.sha256).stat().st_size == reference.size
        except FileNotFoundError:
            return False

    def delete(self, sha256: str) -> None:
        self._path(checked_sha256(sha256)).unlink(missing_ok=True)

    def _path(self, sha256: str) -> Path:
        return self._directory / sha256[:2] / sha256

    def _write(self, path: Path, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._unfinished, delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise


def _holds(path: Path, data: bytes) -> bool:
    """Whether `path` has exactly these bytes; a damaged file is then written again."""
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
