"""What a sidecar keeps on its node's disk: files, who needs them, and how much room is left.

Uploads run side by side, so that the file system commits their flushes together.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

from treadle_core.errors import InvalidFieldError, PayloadCorruptError, PayloadMissingError
from treadle_payloads.files import FULL_RETRY_S, FileStore, full_store
from treadle_payloads.holds import Holds
from treadle_payloads.store import (
    Hold,
    PayloadKeeperFencedError,
    PayloadReference,
    PayloadStoreFullError,
    Stay,
)
from treadle_runtime.failpoints import failpoint
from treadle_runtime.files import sync_directory, write_durably

PIN_S = 600.0
"""How long an upload is kept for an attempt that nobody confirms; as long as `IDLE_S`."""

Source = Callable[[memoryview], int]
"""Reads the next bytes of an upload into a buffer; how many, 0 at the end."""

_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class Life:
    """What of a sidecar outlives its process."""

    epoch: int = 0
    """Starts so far."""
    writer_epoch: int = 0
    """Newest writer of the ledger that confirmed something."""


class Spool:
    """Objects of one node. Threads may call it at once."""

    def __init__(
        self,
        directory: Path,
        *,
        budget_bytes: int,
        archive: Path | None = None,
        pin_s: float = PIN_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serves what lies in `directory` in a new epoch; blocks.

        An upload is also in `archive`, where there is one, when it is acknowledged. It is kept
        for `pin_s` seconds until somebody confirms that it is needed.
        """
        self.pin_s = pin_s
        self.files = FileStore(directory)
        self._archive = FileStore(archive) if archive else None
        self._budget = budget_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._holds = Holds()
        self._intact: set[str] = set()
        """What was written, or read and found right, in this epoch."""
        self._coming = 0
        """Bytes that uploads on their way have been promised room for."""
        self._life_path = directory / "life.json"
        self._life = self._read_life()
        self._save(Life(self._life.epoch + 1, self._life.writer_epoch))
        self._sizes = {sha256: status.st_size for sha256, status in self.files.objects()}
        """Of what is here whole."""
        self._used = sum(self._sizes.values())

    @property
    def epoch(self) -> int:
        """Rises with each start."""
        return self._life.epoch

    @property
    def used_bytes(self) -> int:
        """Of whole objects, and of those on their way."""
        return self._used + self._coming

    @property
    def objects(self) -> int:
        """Whole ones."""
        return len(self._sizes)

    def put(self, reference: PayloadReference, holder: str, wanted: Callable[[], Source]) -> None:
        """Keeps an object for an attempt; durable when it returns.

        `wanted` is called where its bytes are not here, once room for them is set aside.

        Raises PayloadStoreFullError, PayloadCorruptError, InvalidFieldError for what would have no
        room in an empty spool, or what `wanted` and its source raise; no bytes are kept then.
        """
        size = reference.size
        if size > self._budget:
            raise InvalidFieldError("size", limit=f"<= {self._budget}, the budget", value=size)
        path = self.files.path(reference.sha256)
        here = self._is_intact(reference)
        with self._lock:
            self._holds.pin(reference.sha256, holder, self._clock() + self.pin_s)
            here = here and reference.sha256 in self._sizes
            if here:
                os.utime(path)
            else:
                self._set_aside(size)
        if here:
            sync_directory(path.parent)  # the upload that named the file may not have come to it
            return
        try:
            with full_store(self.files.directory, size):
                self._write(reference, wanted())
        finally:
            with self._lock:
                self._coming -= size

    def confirm(self, holds: Sequence[Hold], *, writer_epoch: int) -> list[Hold]:
        """As `PayloadStore.confirm`."""
        with self._lock:
            self._check(writer_epoch)
            missing = set(self.files.confirm(holds))
            if len(missing) < len(holds) and writer_epoch > self._life.writer_epoch:
                # Before it records what others may not end.
                self._save(Life(self._life.epoch, writer_epoch))
            for hold in holds:
                if hold not in missing:
                    os.utime(self.files.path(hold.reference.sha256))
                    self._holds.confirm(hold.reference.sha256, hold.holder)
            return [hold for hold in holds if hold in missing]

    def release(self, holds: Iterable[Hold], *, writer_epoch: int) -> int:
        """As `PayloadStore.release`; how many objects were deleted."""
        deleted = 0
        for hold in holds:
            with self._lock:
                self._check(writer_epoch)
                sha256 = hold.reference.sha256
                # Holds are gone with an earlier epoch, so that the ledger has to say so as well.
                alone = self._holds.release(sha256, hold.holder, self._clock())
                if alone and not hold.shared:
                    deleted += self._delete(sha256)
        return deleted

    def idle(self) -> Iterator[Stay]:
        """What the ledger may not need, if it does not say that it does."""
        for stay in self.files.idle(idle_s=self.pin_s):
            with self._lock:
                pinned = self._holds.is_pinned(stay.sha256, self._clock())
            if not pinned:
                yield stay

    def drop(self, stay: Stay, *, writer_epoch: int) -> bool:
        """Deletes what a writer of the ledger does not need, unless it was touched since."""
        with self._lock:
            self._check(writer_epoch)
            path = self.files.path(stay.sha256)
            if not path.exists() or path.stat().st_mtime_ns != stay.touched:
                return False
            return self._delete(stay.sha256)

    def _set_aside(self, size: int) -> None:
        if self.used_bytes + size > self._budget:
            raise PayloadStoreFullError(
                f"payload spool {self.files.directory}: {size} bytes more than its budget of "
                f"{self._budget} bytes, of which {self.used_bytes} are taken",
                field="payload",
                limit=self._budget,
                value=size,
                retry_after_s=FULL_RETRY_S,
            )
        self._coming += size

    def _is_intact(self, reference: PayloadReference) -> bool:
        """Whether an object is here whole; what an earlier epoch left is read once."""
        if self._sizes.get(reference.sha256) != reference.size:
            return False
        if reference.sha256 not in self._intact:
            try:
                self.files.map(reference)
            except (PayloadCorruptError, PayloadMissingError):
                return False
            self._intact.add(reference.sha256)
        return True

    def _write(self, reference: PayloadReference, read: Source) -> None:
        path = self.files.path(reference.sha256)
        with NamedTemporaryFile(dir=self.files.unfinished, delete=False, buffering=0) as file:
            try:
                _copy(reference, read, file.fileno())
                failpoint("payloads.upload.before_flush")
                os.fsync(file.fileno())
                if self._archive:
                    self._archive.put(Path(file.name).read_bytes())
                with self._lock:
                    Path(file.name).replace(path)
                    self._used += reference.size - self._sizes.get(reference.sha256, 0)
                    self._sizes[reference.sha256] = reference.size
                    self._intact.add(reference.sha256)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        failpoint("payloads.upload.before_name_flush")
        sync_directory(path.parent)

    def _delete(self, sha256: str) -> bool:
        """Deletes an object, also from the archive; whether there was one."""
        failpoint("payloads.release.before_delete")
        self.files.delete(sha256)
        if self._archive:
            self._archive.delete(sha256)
        self._holds.forget(sha256)
        self._intact.discard(sha256)
        size = self._sizes.pop(sha256, None)
        self._used -= size or 0
        return size is not None

    def _check(self, writer_epoch: int) -> None:
        newest = self._life.writer_epoch
        if writer_epoch < newest:
            raise PayloadKeeperFencedError(
                f"writer epoch {writer_epoch} of the ledger is fenced by epoch {newest}",
                field="writer_epoch",
                limit=newest,
                value=writer_epoch,
            )

    def _read_life(self) -> Life:
        if not self._life_path.exists():
            return Life()
        return Life(**json.loads(self._life_path.read_text(encoding="utf-8")))

    def _save(self, life: Life) -> None:
        write_durably(self._life_path, json.dumps(asdict(life)).encode())
        self._life = life


def _copy(reference: PayloadReference, read: Source, descriptor: int) -> None:
    """Raises PayloadCorruptError unless exactly the bytes of `reference` come."""
    digest, left = hashlib.sha256(), reference.size
    buffer = memoryview(bytearray(min(_CHUNK, max(left, 1))))
    while left:
        part = buffer[: read(buffer[: min(left, len(buffer))])]
        if not part:
            break
        digest.update(part)
        left -= len(part)
        while part:
            part = part[os.write(descriptor, part) :]
    reference.check_size(reference.size - left)
    if digest.hexdigest() != reference.sha256:
        raise PayloadCorruptError(
            f"payload {reference.sha256}: its bytes have sha256 {digest.hexdigest()}",
            field="sha256",
            limit=reference.sha256,
            value=digest.hexdigest(),
        )
