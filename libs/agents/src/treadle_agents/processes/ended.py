"""How a command ended."""

from dataclasses import dataclass
from enum import StrEnum


class Cut(StrEnum):
    """Why a command was killed."""

    DEADLINE = "deadline"
    """Its wall-clock limit passed."""
    OUTPUT = "output"
    """It wrote more than it may."""
    MEMORY = "memory"
    """It used more memory than it may."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What a command left, once nothing of its process tree is left."""

    status: int
    """Exit status as a shell says it: 128 and the signal's number where one ended it, or we did."""
    output: bytes
    """Its standard output; with `errors` at most the limit on output."""
    errors: bytes
    """Its standard error."""
    seconds: float
    """Wall-clock time until nothing of it was left."""
    cut: Cut | None = None
    """Why it was killed; None where it ended by itself."""

    @property
    def ok(self) -> bool:
        """It ended by itself, with status 0."""
        return self.cut is None and self.status == 0
