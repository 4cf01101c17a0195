"""Tiny coding tasks: a file lacks the body of a function, and tests say whether it is right."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

from treadle_core.tickets import Json

STUB = """\
def value():
    raise NotImplementedError
"""


@dataclass(frozen=True, slots=True)
class CodingTasks:
    """Endless TaskSource: the same cursor gives the same task."""

    seed: int = 0

    def read(self, cursor: int) -> Mapping[str, Json]:
        """Returns task `cursor`, from 0, with the folder's `files` and the hidden `tests`."""
        chance = random.Random(f"{self.seed}/{cursor}")  # noqa: S311, no secret
        terms = [chance.randint(10, 99) * chance.choice((1, -1)) for _ in range(2)]
        expression = f"{abs(terms[0])}{terms[1]:+d}"
        answer = abs(terms[0]) + terms[1]
        return {
            "prompt": f"Make value() of solution.py return what {expression} is, and try it.",
            "expression": expression,
            "files": {"solution.py": STUB},
            "tests": f"def test_value():\n    assert value() == {answer}\n",
        }
