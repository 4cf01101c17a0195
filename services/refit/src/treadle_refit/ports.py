"""What refit needs from the outside world; adapters/ provides it."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Committed:
    """The newest committed version."""

    version: int = 0
    """0 when there is none."""
    weights_digest: str = ""
    """Of all its weights, 16 hex digits; empty where the ledger does not say."""


class VersionLedger(Protocol):
    """A run's policy versions as the ledger keeps them. Mutations are keyed and safe to repeat.

    Calls raise TreadleError with the ledger's reason, and kind UNAVAILABLE when it is away.
    """

    async def newest_committed(self) -> Committed:
        """Newest committed version."""
        ...

    async def announce(
        self, *, trainer_epoch: int, step: int, request_id: str, trace_id: str
    ) -> int:
        """The next publication number, durable; the same for the same `request_id`.

        Raises TRAINER_FENCED when a newer trainer acquired the run.
        """
        ...

    async def commit(self, *, trainer_epoch: int, version: int, weights_digest: str) -> None:
        """Records that engines may install the version, durable when it returns.

        Raises TRAINER_FENCED, VERSION_ENDED or UNKNOWN_VERSION.
        """
        ...

    async def abort(self, *, version: int, message: str) -> None:
        """Gives the version up. Raises VERSION_ENDED when it is committed, UNKNOWN_VERSION."""
        ...
