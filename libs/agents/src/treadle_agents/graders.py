"""Graders: what an answer is worth. Plugins of `treadle.graders`.

A grader is a class whose fields are its configuration and whose call is `grader(answer, task)`, or,
by path, a function of the same two. `answer` is what the policy said, without its stop token; the
reward is a number within ±1e6. What a grader raises fails the episode, and is never a reward. A
grader may block: it is asked in a thread of its own. Those that need more than a comparison are in
`treadle_agents.grading`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from treadle_core.tickets import Json

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")


class Grader(Protocol):
    """What an answer is worth."""

    def __call__(self, answer: str, task: Mapping[str, Json]) -> float:
        """The reward of `answer` to `task`."""
        ...


@dataclass(frozen=True, slots=True)
class Exact:
    """Grader plugin `exact`: 1 where the answer is the task's, letter for letter."""

    field: str = "answer"
    """Field of the task."""

    def __call__(self, answer: str, task: Mapping[str, Json]) -> float:
        return float(answer.strip() == str(expected(task, self.field)).strip())


@dataclass(frozen=True, slots=True)
class Number:
    """Grader plugin `number`: 1 where the last number of the answer is the last of the task's."""

    field: str = "answer"
    """Field of the task: a number, or a text that ends with one."""

    def __call__(self, answer: str, task: Mapping[str, Json]) -> float:
        right = last_number(str(expected(task, self.field)))
        if right is None:
            raise ValueError(f"task.{self.field}: expected a number, got none")
        return float(last_number(answer) == right)


@dataclass(frozen=True, slots=True)
class Regex:
    """Grader plugin `regex`: 1 where the pattern is found.

    A group named `answer` must then be the task's `answer`.
    """

    pattern: str
    """Of Python's `re`."""
    field: str = "answer"
    """Field of the task."""

    def __post_init__(self) -> None:
        """Raises ValueError where the pattern is none."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ValueError(f"pattern: expected a regular expression, got {error}") from error

    def __call__(self, answer: str, task: Mapping[str, Json]) -> float:
        found = re.search(self.pattern, answer)
        if found is None or "answer" not in found.groupdict():
            return float(found is not None)
        said = (found["answer"] or "").strip()
        return float(said == str(expected(task, self.field)).strip())


@dataclass(frozen=True, slots=True)
class ReasoningGym:
    """Grader plugin `reasoning_gym`: reasoning-gym's own score of a task of its source.

    The answer is what stands in `<answer>` tags, or all of it where there are none.
    """

    def __post_init__(self) -> None:
        """Raises ImportError where reasoning-gym is not installed."""
        import_module("reasoning_gym")

    def __call__(self, answer: str, task: Mapping[str, Json]) -> float:
        made: Any = expected(task, "reasoning_gym")
        data = _data_set(made["task"], made["size"], made["seed"], json.dumps(made["config"]))
        said = import_module("reasoning_gym").utils.extract_answer(answer)
        return data.score_answer(answer if said is None else said, data[made["index"]])


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, thousands' commas allowed; None where there is none."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def expected(task: Mapping[str, Json], field: str) -> Json:
    """What the task says in `field`; raises KeyError where it says nothing."""
    if field not in task:
        raise KeyError(f"task.{field}: required by the grader; the task has {', '.join(task)}")
    return task[field]


@cache
def _data_set(task: str, size: int, seed: int, config: str) -> Any:
    gym = import_module("reasoning_gym")
    return gym.create_dataset(task, size=size, seed=seed, **json.loads(config))
