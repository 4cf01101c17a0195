"""The PayloadStore port: durable bytes under their sha256."""

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol

from treadle_core.errors import InvalidFieldError, Kind, PayloadCorruptError, TreadleError

INLINE_LIMIT = 65536
"""Bytes up to which a payload travels inline in the ledger instead of through a store."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class PayloadStoreFullError(TreadleError):
    """The store has no room for the payload; nothing of it was kept."""

    kind = Kind.EXHAUSTED
    reason = "PAYLOAD_STORE_FULL"


@dataclass(frozen=True, slots=True)
class PayloadReference:
    """Names a payload by its content. Construction raises InvalidFieldError on a bad one."""

    sha256: str
    """Of the bytes, 64 lower-case hex digits."""
    size: int
    """Length of the bytes."""

    def __post_init__(self) -> None:
        """Checks both, so that a reference is safe in a path."""
        checked_sha256(self.sha256)
        if self.size < 0:
            raise InvalidFieldError("size", limit=">= 0", value=self.size)

    @classmethod
    def of(cls, data: bytes) -> "PayloadReference":
        """The reference of `data`."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    def check(self, data: bytes) -> None:
        """Raises PayloadCorruptError unless `data` is what the reference names."""
        self.check_size(len(data))
        found = hashlib.sha256(data).hexdigest()
        if found != self.sha256:
            raise PayloadCorruptError(
                f"payload {self.sha256}: its bytes have sha256 {found}",
                field="sha256",
                limit=self.sha256,
                value=found,
            )

    def check_size(self, size: int) -> None:
        """Raises PayloadCorruptError unless `size` is the length that the reference names."""
        if size != self.size:
            raise PayloadCorruptError(
                f"payload {self.sha256}: expected {self.size} bytes, got {size}",
                field="size",
                limit=self.size,
                value=size,
            )


class PayloadStore(Protocol):
    """Bytes by content. Methods block; call them off an event loop."""

    def put(self, data: bytes) -> PayloadReference:
        """Stores `data`; durable, in the store's declared mode, when it returns. Idempotent.

        Raises PayloadStoreFullError when there is no room.
        """
        ...

    def get(self, reference: PayloadReference) -> bytes:
        """The bytes, checked against size and sha256.

        Raises PayloadMissingError or PayloadCorruptError.
        """
        ...

    def has(self, reference: PayloadReference) -> bool:
        """Whether bytes of that size lie under that sha256; their content is not read."""
        ...

    def delete(self, sha256: str) -> None:
        """Forgets the bytes; no error when there are none."""
        ...


def checked_sha256(value: str) -> str:
    """Returns `value` if it is 64 lower-case hex digits; raises InvalidFieldError otherwise."""
    if not _SHA256.fullmatch(value):
        raise InvalidFieldError("sha256", limit=_SHA256.pattern, value=repr(value[:80]))
    return value
