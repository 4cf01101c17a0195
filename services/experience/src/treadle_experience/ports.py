"""What the service needs from outside, in its own words."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

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


class Ledger(Protocol):
    """Durable, ordered storage of what was decided (entry points `treadle.ledgers`).

    Methods block and are called by one thread at a time.
    """

    def acquire(self, run_id: str) -> int:
        """Makes the caller the only writer, and returns its writer epoch.

        Creates the ledger on the first call and binds it to `run_id`. Raises WrongRunError when
        it is bound to another run, LedgerFormatError when it is of another format, and
        LedgerFullError when there is no room.
        """
        ...

    def load(self) -> Iterable[Transition]:
        """All transitions in order; payload bytes only where they are not released."""
        ...

    def append(self, transitions: Sequence[Transition], writer_epoch: int) -> None:
        """Stores all of them, or none and raises; durable when it returns.

        Raises WriterFencedError when the ledger was acquired again since, LedgerFullError when
        there is no room: the same append may then be tried again.
        """
        ...

    def close(self) -> None:
        """Lets go of files and connections."""
        ...
