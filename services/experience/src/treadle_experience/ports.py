"""What the service needs from outside, in its own words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from treadle_core.tickets import Json
from treadle_experience.core.transitions import Transition

TaskSpec: TypeAlias = Mapping[str, Json]
"""A task as its source made it: one JSON object."""


class TaskSource(Protocol):
    """Where tasks come from (entry points `treadle.task_sources`)."""

    def read(self, cursor: int) -> TaskSpec | None:
        """Task number `cursor`, from 0; None once there is none and none will come.

        A pure function of the cursor: it is asked more than once for the same task, and again
        after a restart.
        """
        ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ledger at one moment."""

    position: int
    """Last position that was appended; the journal folds into it unless it is damaged."""
    journal: Sequence[Transition]
    """As `Ledger.load` tells it, or with what was condensed since."""


class Durability(StrEnum):
    """What survives of what was acknowledged."""

    NONE = "none"
    """Nothing: it ends with its process."""
    PROCESS = "process"
    """Our crash; a crash of the server's host may take what was acknowledged last."""
    HOST = "host"
    """Fsynced on one host."""
    FLEET = "fleet"
    """Fsynced in an archive too."""


class Ledger(Protocol):
    """Durable, ordered storage of what was decided (entry points `treadle.ledgers`).

    Methods block and are called by one thread at a time.
    """

    @property
    def durability(self) -> Durability:
        """What it declares."""
        ...

    def acquire(self, run_id: str) -> int:
        """Makes the caller the only writer, and returns its writer epoch.

        Creates the ledger on the first call and binds it to `run_id`. Raises WrongRunError when
        it is bound to another run, LedgerFormatError when it is of another format, and
        LedgerFullError when there is no room.
        """
        ...

    def load(self) -> Iterable[Transition]:
        """All transitions in order; payload bytes only where they are not released.

        After a `condense`, its head and what came later.
        """
        ...

    def append(self, transitions: Sequence[Transition], writer_epoch: int) -> None:
        """Stores all of them, or none and raises; durable when it returns.

        Raises WriterFencedError when the ledger was acquired again since, LedgerFullError when
        there is no room: the same append may then be tried again.
        """
        ...

    def condense(self, head: Sequence[Transition], position: int, writer_epoch: int) -> None:
        """Puts `head`, which folds into the same, in the place of all up to and with `position`.

        All or nothing, and durable when it returns. `position` was appended, and nothing is to be
        condensed twice. Payload bytes are not stored again: those of the episodes stay until they
        are released. What was replaced may be kept for `read`. Raises as `append` does.
        """
        ...

    def read(self) -> Snapshot:
        """One consistent look, also while another process writes; `acquire` need not come before.

        Raises LedgerFormatError where there is no ledger of this format, or a row says nothing.
        """
        ...

    def close(self) -> None:
        """Lets go of files and connections."""
        ...


@runtime_checkable
class SharedLedger(Ledger, Protocol):
    """A ledger that processes of several hosts reach: its writer says all the time that it lives.

    `acquire` raises LedgerHeldError while another writer does. `beat` and `resign` may be called by
    a thread of their own, and raise WriterFencedError where another writer has followed.
    """

    def follow(self) -> None:
        """Reads what there is now, beside its writer, so that a later `load` is short."""
        ...

    def beat(self) -> None:
        """Says that the writer lives, for some seconds; nothing before `acquire`.

        Raises LedgerAwayError soon.
        """
        ...

    def resign(self) -> None:
        """Says that the writer has ended, so that another need not wait."""
        ...


@runtime_checkable
class ArchivedLedger(Ledger, Protocol):
    """A ledger with a second home, from which the first can be brought back."""

    def restore(self) -> int:
        """Stores what the archive has and the ledger has not; returns how many transitions.

        Fences who wrote. Raises InvalidFieldError where none is kept, and as `acquire` does.
        """
        ...
