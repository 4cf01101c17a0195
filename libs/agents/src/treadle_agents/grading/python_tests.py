"""Grader `python_tests`: whether the answer's code passes hidden tests, in a sandbox."""

import asyncio
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from treadle_agents.graders import expected
from treadle_agents.sandbox.chosen import sandbox_of
from treadle_agents.sandbox.ports import Limits, run_once
from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_core.tickets import Json

_FENCED = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROGRAMS = {
    f"treadle_agents/grading/{name}": Path(__file__).with_name(name).read_bytes()
    for name in ("examiner.py", "subject.py", "crossing.py")
}
"""What a fresh box gets, besides the code; nothing that an agent could have written to."""


class ExaminerLostError(TreadleError):
    """Tests could not be begun, which is no answer's fault."""

    kind = Kind.UNAVAILABLE
    reason = "EXAMINER_LOST"


@dataclass(frozen=True, slots=True)
class PythonTests:
    """Grader plugin `python_tests`: 1 where the answer's code passes the task's tests.

    The code is the last fenced block of the answer, or all of it. A task's tests are Python source,
    or a list of sources and of `{input: ..., output: ...}`, for code that reads and prints. A
    source finds what the code defines by its name, and as `solution.NAME`; it passes where it runs
    to its end, and each function `test_...` in it is a test of its own. Tests call code in
    another process: plain values cross, objects of its own classes stay there, and are equal to
    themselves alone. Code that takes too long, or too much, does not pass.
    """

    field: str = "tests"
    """Field of the task."""
    partial: bool = False
    """The reward is the share of tests that pass."""
    seconds: float = 10.0
    """Processor time for the code in each of the list."""
    deadline_s: float = 120.0
    """Wall-clock time of all tests; code that has not ended then does not pass."""
    memory_mb: int = 512
    """Memory for code and tests."""
    sandbox: Any = "bubblewrap"
    """By name, or as `{name: ..., parameter: ...}`."""

    def __post_init__(self) -> None:
        """Raises InvalidFieldError where there is no such sandbox."""
        sandbox_of(self.sandbox)

    def __call__(self, answer: str, task: Mapping[str, Json]) -> float:
        return asyncio.run(self.grade(answer, task))

    async def grade(self, answer: str, task: Mapping[str, Json]) -> float:
        """The same, for callers with an event loop."""
        seal = secrets.token_hex(16)
        asked = {
            "code": code_of(answer),
            "tests": expected(task, self.field),
            "seconds": self.seconds,
            "seal": seal,
        }
        ended, _ = await run_once(
            sandbox_of(self.sandbox),
            ["python3", "-m", "treadle_agents.grading.examiner"],
            limits=Limits(memory_mb=self.memory_mb, seconds=self.deadline_s),
            files=_PROGRAMS,
            given=json.dumps(asked).encode(),
        )
        begun, _, said = ended.output.partition(b"\n")
        if begun != b"begun":
            why = (ended.errors or ended.output).decode(errors="replace")[-600:]
            raise ExaminerLostError(f"python_tests: {why}", field="python_tests", value=why)
        verdict = _verdict(said, seal)
        if "error" in verdict:
            raise InvalidFieldError(f"task.{self.field}", limit="tests", value=verdict["error"])
        if not verdict.get("of"):
            return 0.0
        share = verdict["passed"] / verdict["of"]
        return share if self.partial else float(share == 1)


def code_of(answer: str) -> str:
    """The last fenced block of an answer, or all of it."""
    fenced = _FENCED.findall(answer)
    return fenced[-1] if fenced else answer


def _verdict(said: bytes, seal: str) -> dict[str, Any]:
    """What the examiner said, and nobody else; nothing where it could not."""
    for line in said.splitlines():
        try:
            told: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and cast("dict[str, Any]", told).get("seal") == seal:
            return cast("dict[str, Any]", told)
    return {}
