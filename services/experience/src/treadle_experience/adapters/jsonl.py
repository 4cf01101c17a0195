"""TaskSource `jsonl`: the tasks of a file, one JSON object a line."""

import json
from pathlib import Path
from typing import Any

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Json
from treadle_experience.ports import TaskSpec


class JsonlTasks:
    """TaskSource plugin `jsonl`. Reads the whole file when it is built."""

    def __init__(self, path: str) -> None:
        """Raises InvalidFieldError naming the first line that is no JSON object."""
        file = Path(path)
        if not file.is_file():
            raise InvalidFieldError("source.path", limit="a file", value=path)
        with file.open("rb") as lines:
            self._tasks = [
                _parse(f"{path}:{number}", line) for number, line in enumerate(lines, start=1)
            ]

    def read(self, cursor: int) -> TaskSpec | None:
        return self._tasks[cursor] if cursor < len(self._tasks) else None


def _parse(where: str, line: bytes) -> dict[str, Json]:
    limit = "one JSON object a line"
    try:
        task: Any = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidFieldError(where, limit=limit, value=error) from error
    if not isinstance(task, dict):
        raise InvalidFieldError(where, limit=limit, value=type(task).__name__)
    return task  # pyright: ignore[reportUnknownVariableType], JSON by construction


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")
