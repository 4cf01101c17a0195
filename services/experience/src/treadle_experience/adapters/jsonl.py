"""TaskSource `jsonl`: the tasks of a file, one JSON object a line."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Json
from treadle_experience.adapters.rows import Order, renamed
from treadle_experience.ports import TaskSpec


class JsonlTasks:
    """TaskSource plugin `jsonl`. Reads the whole file when it is built."""

    def __init__(
        self,
        path: str,
        columns: dict[str, str] | None = None,
        epochs: int | None = 1,
        shuffle: int | None = None,
    ) -> None:
        """Takes `columns` (field of the task: key of the line; all keys as they are when absent).

        The file is read `epochs` times (null: without end), in its own order or, with `shuffle`, in
        one that follows from that seed and differs by epoch. Raises InvalidFieldError naming the
        first line that is no JSON object, or lacks a column.
        """
        file = Path(path)
        if not file.is_file():
            here = f"{path}, looked for from {Path.cwd()}"
            raise InvalidFieldError("source.path", limit="a file", value=here)
        with file.open("rb") as lines:
            self._tasks = [
                renamed(_parse(where := f"{path}:{number}", line), columns, where)
                for number, line in enumerate(lines, start=1)
            ]
        self._order = Order(len(self._tasks), epochs=epochs, shuffle=shuffle)

    def read(self, cursor: int) -> TaskSpec | None:
        row = self._order.row(cursor)
        return None if row is None else self._tasks[row]


def _parse(where: str, line: bytes) -> Mapping[str, Json]:
    limit = 'one JSON object a line, such as {"prompt": "6 * 7", "answer": 42}'
    if not line.strip():
        raise InvalidFieldError(where, limit=limit, value="an empty line; remove it")
    try:
        task: Any = json.loads(line.rstrip(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(where, limit=limit, value=_said(error, line)) from error
    if not isinstance(task, dict):
        kind = type(cast("object", task)).__name__
        advice = "; write each of its elements on a line" if kind == "list" else ""
        raise InvalidFieldError(where, limit=limit, value=f"a {kind}{advice}")
    return task  # pyright: ignore[reportUnknownVariableType], JSON by construction


def _said(error: Exception, line: bytes) -> str:
    """What is wrong, where in the line, and what is there."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    text = line.decode(errors="replace")
    near = text[max(error.pos - 20, 0) : error.pos + 20].strip()
    return f"{error.msg} at column {error.colno}, near {near!r}"


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant}, which is not JSON; write null, or leave the key out")
