"""Ranks: processes that take each step together, every one on its share of the episodes."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from treadle_trainer.core.claims import Claim


class Ranks(Protocol):
    """All ranks of a step, this one among them; each calls the same methods in the same order.

    Methods block, and raise RanksLostError where another rank is gone, or silent for too long.
    """

    @property
    def rank(self) -> int:
        """This one, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def gather(self, said: bytes) -> list[bytes]:
        """What each of them said, in their order. Where none said anything, one reduction."""
        ...

    def add_up(self, tensor: Tensor) -> None:
        """Makes a tensor its sum over all ranks, with the same bits on each of them."""
        ...


class OneRank:
    """A rank that is alone."""

    rank = 0
    size = 1

    def gather(self, said: bytes) -> list[bytes]:
        return [said]

    def add_up(self, tensor: Tensor) -> None:
        """The sum over one rank is there."""


ALONE = OneRank()


class NoFollowers:
    """Followers of a rank that is alone."""

    ranks = ALONE

    def load(self, folder: Path, *, optimizer: bool, digest: Callable[[], str]) -> None:
        """Nobody loads."""

    def train(self, step: int, claim: Claim) -> None:
        """Nobody follows."""

    def end(self) -> None:
        """Nobody ends."""
