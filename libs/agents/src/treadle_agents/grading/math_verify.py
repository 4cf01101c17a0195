"""Grader `math_verify`: whether an answer is mathematically what is right."""

import atexit
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import IO, cast

from treadle_agents.graders import expected
from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_core.tickets import Json

START_S = 120.0
"""Most seconds until a comparing process has imported what it needs."""
PATIENCE = 20
"""So many times the processor time, on the clock, until a comparison that got none has failed."""


class ComparisonLostError(TreadleError):
    """A comparison came to no end, and not because of the answer."""

    kind = Kind.UNAVAILABLE
    reason = "COMPARISON_LOST"


@dataclass(frozen=True, slots=True)
class MathVerify:
    """Grader plugin `math_verify`: 1 where the answer is mathematically what is right.

    Both may be LaTeX or plain, as math-verify reads them: of the answer what is boxed, or stands
    last. One that cannot be compared within `seconds` of processor time, or in 2 GiB of memory, is
    worth 0.
    """

    field: str = "answer"
    """Field of the task: what is right."""
    seconds: float = 5.0
    """Processor time that one comparison may take."""

    def __post_init__(self) -> None:
        """Raises ImportError where math-verify is not installed."""
        import_module("math_verify")

    def __call__(self, answer: str, task: Mapping[str, Json]) -> float:
        right = str(expected(task, self.field))
        return _COMPARING.compare(right, answer, self.seconds, f"task.{self.field}")


class _Comparing:
    """One process for all graders of this one, which is killed and replaced where it must be."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(self, right: str, said: str, seconds: float, field: str) -> float:
        """The reward. Blocks until the comparisons of others are done."""
        with self._turn:
            process = self._started()
            watch = threading.Timer(seconds * PATIENCE, process.kill)
            watch.start()
            try:
                return self._compared(process, right, said, seconds, field)
            finally:
                watch.cancel()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _compared(
        self, process: "subprocess.Popen[str]", right: str, said: str, seconds: float, field: str
    ) -> float:
        asked, told = cast("IO[str]", process.stdin), cast("IO[str]", process.stdout)
        asked.write(json.dumps({"right": right, "said": said, "seconds": seconds}) + "\n")
        asked.flush()
        understood = told.readline().strip()
        if understood == "wrong":
            raise InvalidFieldError(field, limit="mathematics", value=repr(right[:80]))
        reward = told.readline().strip()
        if reward:
            return float(reward)
        code = process.wait()
        self.close()
        if understood and code == -signal.SIGXCPU:
            return 0.0
        raise ComparisonLostError(
            f"math_verify: comparing ended with {code}", field=field, limit=seconds, value=code
        )

    def _started(self) -> "subprocess.Popen[str]":
        """The process, a fresh one where there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "treadle_agents.grading.math_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        watch = threading.Timer(START_S, self._process.kill)
        watch.start()
        try:
            if cast("IO[str]", self._process.stdout).readline().strip() != "ready":
                code = self._process.wait()
                self.close()
                raise ComparisonLostError(f"math_verify: no comparing process, but {code}")
        finally:
            watch.cancel()
        return self._process


_COMPARING = _Comparing()
atexit.register(_COMPARING.close)
