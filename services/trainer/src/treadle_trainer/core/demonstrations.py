"""Demonstrations: what a policy is shown before it acts for itself."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One text, in pieces. Each is tokenised by itself, so that no token straddles two."""

    pieces: tuple[tuple[str, bool], ...]
    """Text, and whether the policy is to learn to say it. The first is not learnt."""


class Demonstrations(Protocol):
    """Plugins of `treadle.demonstrations`: as many demonstrations as anyone asks for."""

    def read(self, index: int) -> Demonstration:
        """Demonstration `index`, from 0: the same each time it is asked for."""
        ...
