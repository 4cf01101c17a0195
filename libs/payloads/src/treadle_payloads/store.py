"""The PayloadStore port: durable bytes under their sha256."""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from treadle_core.errors import InvalidFieldError, Kind, PayloadCorruptError, TreadleError
from treadle_core.ids import checked_sha256

INLINE_LIMIT = 65536
"""Bytes up to which a payload travels inline in the ledger instead of through a store."""

Buffer: TypeAlias = bytes | memoryview
"""Bytes to read; a view keeps what it shows alive."""

GET_S = 30.0
"""Most seconds that a reader waits for payloads, unless it says otherwise."""

_NODE = re.compile(r"unix:/[\x21-\x7e]{1,250}|[A-Za-z0-9.:\[\]_-]{1,250}:[0-9]{1,5}|")


class PayloadStoreFullError(TreadleError):
    """The store has no room for the payload; nothing of it was kept."""

    kind = Kind.EXHAUSTED
    reason = "PAYLOAD_STORE_FULL"


class PayloadStoreAwayError(TreadleError):
    """The store does not answer; the same call may succeed later."""

    kind = Kind.UNAVAILABLE
    reason = "PAYLOAD_STORE_AWAY"


class PayloadKeeperFencedError(TreadleError):
    """A newer writer of the ledger says what is needed."""

    kind = Kind.PRECONDITION
    reason = "PAYLOAD_KEEPER_FENCED"


@dataclass(frozen=True, slots=True)
class PayloadReference:
    """Names a payload by its content. Construction raises InvalidFieldError on a bad one."""

    sha256: str
    """Of the bytes, 64 lower-case hex digits."""
    size: int
    """Length of the bytes."""
    node: str = field(default="", compare=False)
    """Address of the sidecar that holds the bytes; empty: the run's own store does."""
    epoch: int = field(default=0, compare=False)
    """Life of that sidecar in which they were uploaded."""

    def __post_init__(self) -> None:
        """Checks all, so that a reference is safe in a path and can be called."""
        checked_sha256(self.sha256)
        for name, value in (("size", self.size), ("epoch", self.epoch)):
            if value < 0:
                raise InvalidFieldError(name, limit=">= 0", value=value)
        if not is_node(self.node):
            limit = "unix:/path, host:port or empty"
            raise InvalidFieldError("node", limit=limit, value=repr(self.node[:80]))

    @classmethod
    def of(cls, data: bytes) -> "PayloadReference":
        """The reference of `data`."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    def check(self, data: Buffer) -> None:
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


@dataclass(frozen=True, slots=True)
class Hold:
    """That an episode needs a payload."""

    reference: PayloadReference
    holder: str
    """The episode."""
    shared: bool = False
    """Of a hold that ends: the ledger knows of others that need the bytes, so they stay."""


class PayloadStore(Protocol):
    """Bytes by content (entry points `treadle.payload_stores`).

    Methods block, each for a bounded time; call them off an event loop. What is put stays for
    `IDLE_S` seconds, and until `release` once it is confirmed: the ledger is the only truth of
    what is needed.
    """

    def put(self, data: bytes, *, holder: str = "") -> PayloadReference:
        """Stores `data` for the episode `holder`. Idempotent.

        It is durable, in the store's declared mode, when this returns.

        Raises PayloadStoreFullError when there is no room, PayloadStoreAwayError.
        """
        ...

    def get(self, reference: PayloadReference) -> Buffer:
        """The bytes, checked against size and sha256.

        Raises PayloadMissingError once every place was asked, or PayloadCorruptError.
        """
        ...

    def fetch(
        self, references: Iterable[PayloadReference], *, timeout_s: float = GET_S
    ) -> Mapping[str, Buffer | TreadleError]:
        """Many at once, by sha256: the bytes, checked, or why they cannot be had."""
        ...

    def has(self, reference: PayloadReference) -> bool:
        """Whether that many bytes lie under that sha256; their content is not read."""
        ...

    def confirm(self, holds: Iterable[Hold], *, writer_epoch: int) -> list[Hold]:
        """Keeps bytes until `release`: the ledger is about to record that they are needed.

        Returns those of the holds that it cannot keep: so many bytes are not there. Raises
        PayloadStoreAwayError, or PayloadKeeperFencedError for a writer that was replaced.
        """
        ...

    def release(self, holds: Iterable[Hold], *, writer_epoch: int) -> None:
        """Ends holds, and forgets what no other episode needs; no error where there is nothing.

        A store that does not know who holds what forgets what is not `shared`.

        Raises PayloadStoreAwayError or PayloadKeeperFencedError.
        """
        ...

    def idle(self) -> Iterable["Stay"]:
        """What this process may forget if the ledger does not need it.

        Nothing where the store sees to that itself.
        """
        ...

    def drop(self, stay: "Stay") -> bool:
        """Forgets an object unless it was put since; whether it did."""
        ...


@dataclass(frozen=True, slots=True)
class Stay:
    """An object as it was found idle."""

    sha256: str
    touched: int
    """When it was last put or confirmed, in nanoseconds of some clock; only compared."""


IDLE_S = 600.0
"""How long what was put is kept for a ledger that does not know of it: longer than a report is on
its way. Whoever comes later puts again."""


def is_node(value: str) -> bool:
    """Whether `value` is the address of a sidecar, or empty."""
    return _NODE.fullmatch(value) is not None
