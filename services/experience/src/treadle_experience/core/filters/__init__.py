"""Filters: which groups are worth a place in a batch."""

from collections.abc import Sequence
from typing import Protocol

from treadle_experience.core.state import Result


class Filter(Protocol):
    """Decides about a group once it is whole (entry points `treadle.filters`); pure."""

    def __call__(self, members: Sequence[Result]) -> str:
        """Why the group is dropped, as one word for counts; empty to keep it.

        `members` are the results of the group in the order of their index, at least one.
        """
        ...
