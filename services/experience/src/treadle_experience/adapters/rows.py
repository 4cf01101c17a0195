"""How a data set becomes tasks: which row is task number `cursor`, and which columns it has."""

import random
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Json


class Order:
    """Rows by cursor, over all epochs (None: without end): a pure function of its parameters."""

    def __init__(self, length: int, *, epochs: int | None, shuffle: int | None) -> None:
        """Raises InvalidFieldError when there is nothing to read, or no epoch to read it in."""
        if length < 1:
            raise InvalidFieldError("source.path", limit="at least one task", value="none")
        if epochs is not None and epochs < 1:
            raise InvalidFieldError(
                "source.epochs", limit="at least 1, or null for no end", value=epochs
            )
        self._length, self._epochs, self._shuffle = length, epochs, shuffle
        self._shuffled: tuple[int, list[int]] = (-1, [])

    def row(self, cursor: int) -> int | None:
        """The row of task `cursor`; None past the last epoch."""
        epoch, place = divmod(cursor, self._length)
        if self._epochs is not None and epoch >= self._epochs:
            return None
        if self._shuffle is None:
            return place
        if self._shuffled[0] != epoch:
            # random() is the one generator whose numbers every version of Python promises to keep.
            draw = random.Random(f"{self._shuffle}/{epoch}")  # noqa: S311, no secret
            order = sorted(range(self._length), key=lambda _: draw.random())
            self._shuffled = (epoch, order)
        return self._shuffled[1][place]


def renamed(
    row: Mapping[str, Json], columns: Mapping[str, str] | None, where: str
) -> Mapping[str, Json]:
    """The row under the names of `columns` (field of the task: column); all of it without."""
    if columns is None:
        return row
    require(columns.values(), row, where)
    return {field: row[column] for field, column in columns.items()}


def require(columns: Iterable[str], present: Iterable[str], where: str) -> None:
    """Raises InvalidFieldError naming the first column that is missing, and the nearest."""
    there = list(present)
    for column in columns:
        if column not in there:
            near = get_close_matches(column, there, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}" if near else ""
            listed = ", ".join(there)
            raise InvalidFieldError(
                where, limit=f"a column {column!r} (source.columns)", value=f"{listed}{hint}"
            )
