"""The WeightTransport port: how a version's bytes come from the trainer to the engines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import Kind, TreadleError
from treadle_weights.layouts import Layout
from treadle_weights.plan import Copy


class ArenaFullError(TreadleError):
    """There is no room for a version's bytes."""

    kind = Kind.EXHAUSTED
    reason = "ARENA_FULL"


class ArenaHeldError(TreadleError):
    """Another live sender holds an arena of this name."""

    kind = Kind.CONFLICT
    reason = "ARENA_HELD"


class ArenaMissingError(TreadleError):
    """The arena does not exist, or no longer: its sender died or went on to a newer version."""

    kind = Kind.NOT_FOUND
    reason = "ARENA_MISSING"


class ArenaCorruptError(TreadleError):
    """The bytes that arrived are not those that were sent; `field` is the tensor."""

    kind = Kind.CORRUPT
    reason = "ARENA_CORRUPT"


class VersionBackError(TreadleError):
    """A version older than the newest one; none goes back."""

    kind = Kind.PRECONDITION
    reason = "VERSION_BACK"


class TransferBusyError(TreadleError):
    """This end is sending or receiving another version, or this one, already."""

    kind = Kind.PRECONDITION
    reason = "TRANSFER_BUSY"


class TransferLostError(TreadleError):
    """No whole version came in time, whoever was asked again; the one before is served on."""

    kind = Kind.UNAVAILABLE
    reason = "TRANSFER_LOST"


class EpochMismatchError(TreadleError):
    """The other end is in a group that this one never formed."""

    kind = Kind.PRECONDITION
    reason = "EPOCH_MISMATCH"


@dataclass(frozen=True, slots=True)
class Arena:
    """Where the bytes of one version lie."""

    path: str
    size: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What an engine needs to load one version."""

    version: int
    arena: Arena
    source: Layout
    """The sender's layout in the arena."""
    copies: tuple[Copy, ...]
    """The plan from `source` to the engine's layout."""
    digests: Mapping[str, int]
    """Expected digest of each tensor of the engine, by name."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """How a version arrived: where its time went, in seconds, and what was moved."""

    wire_s: float
    """Until its last byte had come; 0 where the bytes lay within reach."""
    load_s: float
    """Placing what was not placed while others were on the wire."""
    verify_s: float
    """Comparing digests."""
    wire_bytes: int
    """That travelled to this engine."""
    launches: int = 0
    """In how many broadcasts."""
    encoding: str = "dense"
    """`dense` or `delta`."""
    epoch: int = 0
    """Of the group that carried it; 0 for transports without groups."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A version that lies whole where engines can load it, whoever sent it."""

    arena: Arena
    layout: Layout
    digests: Mapping[str, int]
    """Of each tensor, by name, as its sender stated them."""


class WeightSender(Protocol):
    """The trainer's end. Methods block; call them off an event loop."""

    def send(
        self, arena: Arena, layout: Layout, tensors: Iterable[tuple[str, NDArray[Any]]]
    ) -> dict[str, int]:
        """Fills the arena and returns the digest of each tensor, by name.

        `tensors` holds every tensor of `layout` once, whole, with its shape and item size; bits
        are taken as they are. Repeating it overwrites. Raises ArenaFullError, ArenaHeldError,
        InvalidFieldError naming a tensor.
        """
        ...

    def keep(self, arena: Arena) -> None:
        """The version in `arena` is committed: releases the older ones that nobody will ask for.

        Idempotent. What is kept beyond it, and beyond the life of the sender, is the transport's.
        """
        ...

    def discard(self, arena: Arena) -> None:
        """The version in `arena` is aborted: releases it. Idempotent; never for an alias."""
        ...

    def close(self) -> None:
        """Releases every arena but what the transport keeps beyond its sender."""
        ...


class WeightReceiver(Protocol):
    """An engine's end. Methods block; call them off an event loop."""

    def receive(self, order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]) -> Receipt:
        """Copies a version into `buffer`, laid out as `target`, and verifies every tensor.

        Raises ArenaMissingError, ArenaCorruptError naming a tensor, InvalidFieldError, and over a
        wire TransferBusyError, TransferLostError and EpochMismatchError; `buffer` then holds
        anything, but for TransferBusyError.
        """
        ...


class WeightTransport(Protocol):
    """One way to carry weights; the same on both ends and in refit, which names the arenas.

    A plugin's constructor is given the run's directory as `run_dir`.
    """

    def arena(self, run_id: str, version: int, size: int) -> Arena:
        """Where a version's `size` bytes shall lie; the same answer for the same arguments."""
        ...

    def alias(self, run_id: str, version: int, base: Arena) -> Arena:
        """Where `version` lies, whose bytes are those of the committed version in `base`.

        No byte moves. Raises ArenaMissingError where the base's bytes are gone.
        """
        ...

    def find(self, run_id: str, version: int) -> Stored | None:
        """A version that outlived its sender; None where it does not lie here.

        Reads what is stated of it and not its bytes, which the receiver verifies. Raises
        ArenaCorruptError.
        """
        ...

    def sender(self, run_id: str) -> WeightSender:
        """The end of the run's one trainer; releases what dead senders of the run left."""
        ...

    def receiver(self) -> WeightReceiver:
        """The end of one engine."""
        ...
