"""What the trainer needs from outside, in its own words.

Methods that are not coroutines block; they are called from one worker thread. Coroutines raise
TreadleError with the reason that the contract gives, PEER_AWAY included.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from torch import Tensor

from treadle_core.episodes import Segment
from treadle_core.errors import (
    InvalidFieldError,
    Kind,
    PayloadCorruptError,
    PayloadMissingError,
    TreadleError,
)
from treadle_core.faults import Fault
from treadle_trainer.core.claims import Claim, ClaimedEpisode, ComingStep
from treadle_trainer.core.packing import MicroBatch
from treadle_trainer.core.ranks import Ranks
from treadle_weights.layouts import Layout
from treadle_weights.transport import Arena

TRAINER_FENCED = "TRAINER_FENCED"
"""Reason: a newer trainer acquired the run; this one must not write anything more."""

VERSION_ENDED = "VERSION_ENDED"
"""Reason: the version was aborted or replaced; the parameters want another number."""


class Backend(Protocol):
    """A policy's parameters, their gradient and their optimiser.

    Plugins of `treadle.backends` are constructed from a Hugging Face folder, with a fresh
    optimiser.
    """

    @property
    def vocab_size(self) -> int:
        """Token ids of the policy lie below this."""
        ...

    def logprobs(
        self, microbatch: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the targets, with gradient, and entropies in nats; both [M].

        The entropies have a gradient where it is asked for. Under softmax(logits / temperature), in
        float32 or wider. A segment's do not depend on what it is packed with.
        """
        ...

    def add_up_gradient(self, ranks: Ranks) -> None:
        """Makes the gathered gradient its sum over all ranks; only called where there are more."""
        ...

    def clip_gradient(self, max_norm: float) -> float:
        """Scales the gathered gradient to a global norm of at most `max_norm`.

        Returns the norm before; where that is not finite the gradient is of no use.
        """
        ...

    def update(self, learning_rate: float) -> None:
        """Takes one optimiser step, and forgets the gradient."""
        ...

    def discard_gradient(self) -> None:
        """Forgets the gradient."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """The live parameters by name, in a fixed order; read only."""
        ...

    def save_policy(self, folder: Path) -> None:
        """Writes the policy as a Hugging Face folder, tokenizer included."""
        ...

    def save_optimizer(self, folder: Path) -> None:
        """Writes the optimiser's state beside it."""
        ...

    def restore_optimizer(self, folder: Path) -> None:
        """Takes the optimiser's state from a folder that `save_optimizer` wrote.

        Raises ParametersMismatchError where it is not that of these parameters.
        """
        ...


class RanksLostError(TreadleError):
    """Another rank is gone, or was silent for too long; this one cannot go on."""

    kind = Kind.BROKEN
    reason = "RANKS_LOST"


class Followers(Protocol):
    """The ranks that follow this one: they load what it loads and take its steps with it.

    Methods block, and raise RanksLostError.
    """

    @property
    def ranks(self) -> Ranks:
        """All of them and this one; there once they have loaded."""
        ...

    def load(self, folder: Path, *, optimizer: bool, digest: Callable[[], str]) -> None:
        """Has them build their backends from a folder; returns once they hold the same parameters.

        `optimizer`: and restore its optimiser. `digest` says what parameters this rank holds.
        """
        ...

    def train(self, step: int, claim: Claim) -> None:
        """Has them compute a step; this rank does the same, at once."""
        ...

    def end(self) -> None:
        """Has them end."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Build the backend from a folder."""

    number: int
    """Names the order in the answer to it."""
    folder: Path
    optimizer: bool
    """And restore the optimiser from it."""


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Compute a step."""

    step: int
    claim: Claim
    """The inline payloads of other ranks' episodes are left out."""


class Orders(Protocol):
    """What rank 0 has its followers do, as one of them is told. Methods block."""

    @property
    def ranks(self) -> Ranks:
        """All ranks; there once something was to be loaded."""
        ...

    def next(self) -> LoadOrder | StepOrder | None:
        """Waits for the next order, however long rank 0 has none; None is the end.

        Raises RanksLostError where rank 0 is gone or silent.
        """
        ...

    def loaded(self, load: LoadOrder, digest: str) -> None:
        """Says what parameters this rank holds, now that it has loaded them."""
        ...


Read: TypeAlias = (
    tuple[Segment, ...] | PayloadMissingError | PayloadCorruptError | InvalidFieldError
)
"""The segments of an episode, at least one; or why they cannot be had, or are unfit."""


class PayloadReader(Protocol):
    """Where the heavy part of episodes comes from."""

    def read(self, episodes: Sequence[ClaimedEpisode]) -> list[Read]:
        """What each of them has, in their order, checked against its payload's sha256.

        Raises TreadleError where the store cannot be asked now.
        """
        ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as the ledger knows it."""

    digest: str
    """sha256 of its manifest, 64 hex digits."""
    parent_digest: str
    """Digest of the one before it; empty for the first."""
    step: int
    """Last step that it covers; 0 for the start parameters."""
    path: str
    """Where it lies, relative to the run's directory."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """What a store wrote."""

    digest: str
    path: str
    """Relative to the run's directory."""


class CheckpointCorruptError(TreadleError):
    """A checkpoint is not, byte for byte, what its digest says; `field` names the file."""

    kind = Kind.CORRUPT
    reason = "CHECKPOINT_CORRUPT"


class CheckpointStoreFullError(TreadleError):
    """There is no room for a checkpoint; nothing of it was kept, and nothing older was lost."""

    kind = Kind.EXHAUSTED
    reason = "CHECKPOINT_STORE_FULL"


class CheckpointStore(Protocol):
    """Folders of files that are whole or not there."""

    def write(self, step: int, fill: Callable[[Path], None]) -> StoredCheckpoint:
        """Lets `fill` write files into an empty folder, and stores them under a manifest.

        Durable when it returns. Raises CheckpointStoreFullError.
        """
        ...

    def open(self, checkpoint: Checkpoint) -> Path:
        """The folder, every byte verified. Raises CheckpointCorruptError."""
        ...

    def mark_latest(self, checkpoint: Checkpoint) -> None:
        """Leaves a hint for people which one is the newest; nothing reads it.

        Raises CheckpointStoreFullError.
        """
        ...

    def retain(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Deletes all others that were there before the last `write`."""
        ...

    def remove_leftovers(self) -> Sequence[str]:
        """Removes what writers left before this store was opened; returns names."""
        ...


@dataclass(frozen=True, slots=True)
class RunView:
    """A run as the ledger describes it."""

    position: int
    """Of the journal."""
    checkpoints: tuple[Checkpoint, ...]
    """Restorable, newest first."""
    complete: bool
    """All is done, final evaluation included."""


class Experience(Protocol):
    """The ledger of one run. Mutations are keyed, so that repeating one is safe."""

    async def get_run(self, *, after: int, wait_s: float) -> RunView:
        """Waits up to `wait_s` for a position beyond `after`."""
        ...

    async def acquire(self, *, holder: str, checkpoint_digest: str) -> int:
        """Makes `holder` the only trainer, going on from a checkpoint ("" on a first start).

        Returns its trainer epoch.
        """
        ...

    async def claim(self, *, trainer_epoch: int, step: int, wait_s: float) -> Claim:
        """Waits up to `wait_s` for the batch of a step."""
        ...

    async def preview(self, *, max_steps: int) -> Sequence[ComingStep]:
        """What the next claims will probably hold; claims nothing.

        What is claimed and not trained, then up to `max_steps` that are not claimed.
        """
        ...

    async def hand_back(self, *, trainer_epoch: int, step: int, faults: Sequence[Fault]) -> None:
        """Gives the claimed batch of a step back, for what is wrong with it; claim it again."""
        ...

    async def report(
        self, *, trainer_epoch: int, step: int, metrics: Mapping[str, float], trace_id: str
    ) -> bool:
        """Says that a step was trained; nothing of it is durable yet.

        Whether a checkpoint is wanted now, because payloads that wait for one take much room.
        """
        ...

    async def commit(self, *, trainer_epoch: int, checkpoint: Checkpoint) -> Sequence[Checkpoint]:
        """Commits a checkpoint; returns all that must stay restorable."""
        ...


@dataclass(frozen=True, slots=True)
class NewVersion:
    """Parameters that are to be published."""

    trainer_epoch: int
    step: int
    request_id: str
    """Keys the publication."""
    layout: Layout
    trace_id: str
    """Of the step; may be empty."""
    alias_of: int
    """The version published last, where it has the same parameters; else 0."""
    weights_digest: str
    """Of that version; else empty."""


@dataclass(frozen=True, slots=True)
class OpenedVersion:
    """A publication number, and where its bytes go."""

    version: int
    arena: Arena
    aliased: bool = False
    """It stands for the bytes of the version that it was said to be an alias of; put none."""


@dataclass(frozen=True, slots=True)
class SentVersion:
    """Who got a version before it was committed."""

    members: int
    """Engines that verified it."""
    left_behind: int
    """Members that did not in time."""


class Refit(Protocol):
    """The way of one run's parameters to its engines."""

    async def open_version(self, new: NewVersion) -> OpenedVersion:
        """Gets a number, the same for the same request; ends the publication in flight."""
        ...

    async def send_version(
        self, *, trainer_epoch: int, version: int, digests: Mapping[str, int]
    ) -> SentVersion:
        """Says that the bytes lie complete; returns once the version is committed.

        Raises VERSION_ENDED where the parameters want another number.
        """
        ...

    async def await_demand(self, *, published_version: int, wait_s: float) -> bool:
        """Waits up to `wait_s` until an engine needs parameters that only the trainer has."""
        ...
