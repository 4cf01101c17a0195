"""Where a run's numbers go: a port, and the JSON lines that every run keeps."""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """Takes rows of numbers, in order."""

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        """Keeps one row, under the name of its kind ("step", "evaluation", ...)."""
        ...


class JsonlTracker:
    """Appends `{"time", "name", ...}`, one JSON object a line; time in Unix seconds."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        row = {"time": round(time.time(), 3), "name": name, **values}
        os.write(self._descriptor, (json.dumps(row) + "\n").encode())
