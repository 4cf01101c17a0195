"""Measures: what a proof or a bench says, one JSON object a line."""

import json
import operator
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

NONE = "none"
"""The goal of a measure that has none, and always holds."""

_SIGNS = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True)
class Measure:
    """One number and the goal that it has to meet."""

    measure: str
    value: float
    unit: str
    goal: str = NONE
    """A sign and a number, as `>= 0.97`, or `none`."""
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    """More keys of the line; plain JSON."""

    @property
    def holds(self) -> bool:
        """Whether the goal is met."""
        if self.goal == NONE:
            return True
        sign, bound = self.goal.split(" ")
        return bool(_SIGNS[sign](self.value, float(bound)))

    def line(self) -> str:
        """The line, with its end."""
        row = {"measure": self.measure, "value": round(self.value, 4), "unit": self.unit}
        return json.dumps({**row, "goal": self.goal, "holds": self.holds, **self.details}) + "\n"


def report(measures: Iterable[Measure]) -> int:
    """Writes measures to stdout as they come; returns an exit status, 1 where one does not hold."""
    missed = 0
    for measure in measures:
        sys.stdout.write(measure.line())
        sys.stdout.flush()
        missed += not measure.holds
    return 1 if missed else 0
