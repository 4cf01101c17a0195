"""Tracker `tensorboard`: event files for `tensorboard --logdir RUN/tensorboard`."""

import contextlib
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from tensorboard.summary import Writer
except ModuleNotFoundError as error:
    raise ImportError(f"{error}; pip install 'treadle-runtime[tensorboard]' brings it") from error

log = logging.getLogger(__name__)

_STEPS = ("step", "trained_step", "version", "served_version")
"""Keys that say how far training was, the best first."""


class TensorBoardTracker:
    """Writes the numbers of rows as scalars `<name>/<key>`, at the step of the row.

    A row without one lies at the version that it names. What is no finite number is left out; the
    name of an evaluation set becomes part of the scalar's. Once a row finds no room, nothing more
    is written, and a log line says so.
    """

    def __init__(self, run_dir: Path, service: str) -> None:
        self._writer: Any = Writer(str(run_dir / "tensorboard" / service))

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        if self._writer is None:
            return
        if "evaluation" in values:
            name = f"{name}/{values['evaluation']}"
        step = next((int(values[key]) for key in _STEPS if key in values), 0)
        try:
            for key, value in values.items():
                if not isinstance(value, str) and math.isfinite(value) and key != "step":
                    self._writer.add_scalar(f"{name}/{key}", value, step)
            self._writer.flush()
        except OSError as error:
            log.warning("no more numbers for TensorBoard: %s", error)
            with contextlib.suppress(OSError):  # its last rows find no room either
                self._writer.close()
            self._writer = None
