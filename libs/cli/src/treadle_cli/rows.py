"""The rows of a run's metrics files (docs/metrics.md), as they are added."""

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""One line of a metrics file: `time`, `name` and what belongs to that kind."""

WRITERS = ("supervisor", "experience", "refit", "rollout", "trainer")
"""Who keeps a file of metrics; of rows of one time, the causes before what they lead to."""


class MetricsTail:
    """Reads the rows that one service adds to its metrics file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def rows(self) -> list[Row]:
        """Rows since the last call; one that is still being written waits, a torn one is none."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [row for line in whole.splitlines() if (row := _row(line)) is not None]


class RunTail:
    """Reads the rows of all services of a run."""

    def __init__(self, directory: Path) -> None:
        self._tails = {
            writer: MetricsTail(directory / "metrics" / f"{writer}.jsonl") for writer in WRITERS
        }

    def rows(self) -> list[tuple[str, Row]]:
        """Rows since the last call, each with its writer, in the order of their time."""
        found = [(writer, row) for writer, tail in self._tails.items() for row in tail.rows()]
        return sorted(found, key=lambda pair: pair[1]["time"])


def written(run: Path, writer: str, name: str) -> list[Row]:
    """The rows of one kind that a run's directory holds by now, in order."""
    path = run / "metrics" / f"{writer}.jsonl"
    return [row for row in MetricsTail(path).rows() if row["name"] == name]


def _row(line: bytes) -> Row | None:
    """None for what a power cut left of a line."""
    try:
        row: Row = json.loads(line)
    except ValueError:
        return None
    return row
