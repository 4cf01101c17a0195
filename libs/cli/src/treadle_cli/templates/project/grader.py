"""The grader: what an answer is worth."""

from collections.abc import Mapping
from typing import Any


def grade(answer: str, task: Mapping[str, Any]) -> float:
    """1 for the number that was thought of, and 0 for any other answer."""
    return float(answer == str(task["answer"]))
