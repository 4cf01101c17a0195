"""PayloadStore `files`: content-addressed files below one directory."""

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile

from treadle_core.errors import InvalidFieldError, PayloadMissingError, TreadleError
from treadle_core.ids import checked_sha256, is_sha256
from treadle_payloads.store import (
    GET_S,
    IDLE_S,
    Buffer,
    Hold,
    PayloadReference,
    PayloadStoreFullError,
    Stay,
)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FULL_RETRY_S = 1.0
_ABANDONED_AFTER_S = 3600.0
"""No writer takes this long, so an unfinished file of this age has lost its writer."""


class FileStore:
    """PayloadStore plugin `files`: `directory/ab/abcd...`, one file per payload.

    A file is complete from the moment at which it has its name, so many processes may share the
    directory. Durability is `host`: fsynced on this node before `put` returns.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        run_dir: str | Path | None = None,
        run_id: str = "",
    ) -> None:
        """Creates the directories that are missing and drops what killed writers left.

        `directory` is `payloads` in the run's directory unless it is given.
        """
        del run_id  # the directory is the run's
        if directory is None:
            if run_dir is None:
                raise InvalidFieldError("directory", limit="a directory", value="none")
            directory = Path(run_dir) / "payloads"
        self.directory = Path(directory)
        self.unfinished = self.directory / "tmp"
        self.unfinished.mkdir(parents=True, exist_ok=True)
        for prefix in range(256):
            (self.directory / f"{prefix:02x}").mkdir(exist_ok=True)
        _sync_directory(self.directory)
        _sync_directory(self.directory.parent)
        abandoned = time.time() - _ABANDONED_AFTER_S
        for path in self.unfinished.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < abandoned:
                    path.unlink()

    def put(self, data: bytes, *, holder: str = "") -> PayloadReference:
        del holder
        reference = PayloadReference.of(data)
        with full_store(self.directory, len(data)):
            if not self._holds(reference.sha256, data):
                with NamedTemporaryFile(dir=self.unfinished, delete=False) as file:
                    try:
                        file.write(data)
                        file.flush()
                        os.fsync(file.fileno())
                        Path(file.name).replace(self.path(reference.sha256))
                    except BaseException:
                        Path(file.name).unlink(missing_ok=True)
                        raise
            # On a hit too: the process that renamed the file may not have come to its fsync.
            _sync_directory(self.path(reference.sha256).parent)
        return reference

    def get(self, reference: PayloadReference) -> bytes:
        data = self._read(reference)
        reference.check(data)
        return data

    def fetch(
        self, references: Iterable[PayloadReference], *, timeout_s: float = GET_S
    ) -> Mapping[str, Buffer | TreadleError]:
        del timeout_s  # a file is there or not
        fetched: dict[str, Buffer | TreadleError] = {}
        for reference in references:
            try:
                fetched[reference.sha256] = self.map(reference)
            except TreadleError as error:
                fetched[reference.sha256] = error
        return fetched

    def map(self, reference: PayloadReference) -> memoryview:
        """The bytes as a view of the file, checked; a file is never changed once it has its name.

        Raises as `get`.
        """
        try:
            with self.path(reference.sha256).open("rb") as file:
                reference.check_size(os.fstat(file.fileno()).st_size)
                # An empty file cannot be mapped.
                data = (
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if reference.size else b""
                )
        except FileNotFoundError as error:
            raise self._missing(reference) from error
        view = memoryview(data)
        reference.check(view)
        return view

    def has(self, reference: PayloadReference) -> bool:
        """Whether bytes of that size lie under that sha256; their content is not read."""
        try:
            return self.path(reference.sha256).stat().st_size == reference.size
        except FileNotFoundError:
            return False

    def confirm(self, holds: Iterable[Hold], *, writer_epoch: int = 0) -> list[Hold]:
        del writer_epoch  # who shares a directory shares the ledger's file system
        return [hold for hold in holds if not self.has(hold.reference)]

    def release(self, holds: Iterable[Hold], *, writer_epoch: int = 0) -> None:
        del writer_epoch
        for hold in holds:
            if not hold.shared:
                self.delete(hold.reference.sha256)

    def delete(self, sha256: str) -> None:
        """Forgets the bytes; no error when there are none."""
        self.path(checked_sha256(sha256)).unlink(missing_ok=True)

    def idle(self, *, idle_s: float = IDLE_S) -> Iterator[Stay]:
        """What was put longer than `idle_s` seconds ago; blocks between the items."""
        before = time.time_ns() - int(idle_s * 1e9)
        for sha256, status in self.objects():
            if status.st_mtime_ns < before:
                yield Stay(sha256, status.st_mtime_ns)

    def objects(self) -> Iterator[tuple[str, os.stat_result]]:
        """All that is there; blocks between the items."""
        for prefix in range(256):
            with os.scandir(self.directory / f"{prefix:02x}") as entries:
                for entry in entries:
                    if is_sha256(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            yield entry.name, entry.stat()

    def drop(self, stay: Stay) -> bool:
        path = self.path(stay.sha256)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns == stay.touched:
                path.unlink()
                return True
        return False

    def path(self, sha256: str) -> Path:
        """Where the bytes lie, if they do."""
        return self.directory / sha256[:2] / sha256

    def _read(self, reference: PayloadReference) -> bytes:
        try:
            with self.path(reference.sha256).open("rb") as file:
                reference.check_size(os.fstat(file.fileno()).st_size)
                return file.read()
        except FileNotFoundError as error:
            raise self._missing(reference) from error

    def _holds(self, sha256: str, data: bytes) -> bool:
        """Whether exactly these bytes are there, touched now; damaged ones are written again."""
        path = self.path(sha256)
        try:
            if path.stat().st_size != len(data) or path.read_bytes() != data:
                return False
            os.utime(path)
        except FileNotFoundError:
            return False
        return True

    def _missing(self, reference: PayloadReference) -> PayloadMissingError:
        return PayloadMissingError(
            f"payload {reference.sha256} is not in {self.directory}",
            field="sha256",
            value=reference.sha256,
        )


@contextlib.contextmanager
def full_store(directory: Path, size: int) -> Generator[None]:
    """Turns a disk without room for `size` bytes into PayloadStoreFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise PayloadStoreFullError(
            f"payload store {directory}: {error.strerror} for {size} bytes",
            field="payload",
            limit=error.strerror,
            value=size,
            retry_after_s=FULL_RETRY_S,
        ) from error


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
