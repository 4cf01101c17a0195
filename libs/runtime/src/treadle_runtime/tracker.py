"""Where a run's numbers go: a port, the JSON lines that every run keeps, and what a recipe adds."""

import errno
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from treadle_runtime import plugins
from treadle_runtime.config import RunConfig

log = logging.getLogger(__name__)

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


GROUP = "treadle.trackers"


class Tracker(Protocol):
    """Takes rows of numbers, in order.

    A plugin of `treadle.trackers` is constructed with `run_dir`, `service` and what the recipe
    says in `run.trackers`; in every service a tracker of its own.
    """

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        """Keeps one row, under the name of its kind ("step", "evaluation", ...)."""
        ...


class JsonlTracker:
    """Appends `{"time", "name", ...}`, one JSON object a line; time in Unix seconds.

    Rows that find no room are dropped, and a log line says so: numbers are not worth a service.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        row = {"time": round(time.time(), 3), "name": name, **values}
        line = (json.dumps(row) + "\n").encode()
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            written = 0
        if written < len(line):
            if written:  # half a row would spoil the next one
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            log.warning("no room for a row of numbers: %s", name)


class Trackers:
    """Gives every row to several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        for tracker in self._trackers:
            tracker.log(name, values)


def of_service(run: RunConfig, service: str) -> Tracker:
    """`RUN/metrics/<service>.jsonl`, and the trackers of the recipe. Raises PluginError."""
    others: list[Tracker] = [
        plugins.build(GROUP, each, run_dir=run.dir, service=service) for each in run.trackers
    ]
    return Trackers([JsonlTracker(run.dir / "metrics" / f"{service}.jsonl"), *others])
