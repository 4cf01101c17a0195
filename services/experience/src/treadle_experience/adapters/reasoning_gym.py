"""TaskSource `reasoning_gym`: a procedural data set of reasoning-gym by its name.

Needs `reasoning-gym` (`pip install "treadle-experience[reasoning-gym]"`). The grader
`reasoning_gym` scores its tasks.
"""

from difflib import get_close_matches
from importlib import import_module
from typing import Any

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Json
from treadle_experience.ports import TaskSpec


class ReasoningGymTasks:
    """TaskSource plugin `reasoning_gym`: `size` tasks, each from the seed and its number."""

    def __init__(
        self, task: str, size: int, seed: int = 0, config: dict[str, Any] | None = None
    ) -> None:
        """Takes reasoning-gym's name of the task, and `config`, what that task can be told.

        Raises InvalidFieldError when reasoning-gym is not installed, knows no such task, or
        refuses its configuration.
        """
        try:
            gym: Any = import_module("reasoning_gym")
        except ImportError as error:
            raise InvalidFieldError(
                "source.name",
                limit='reasoning-gym (pip install "treadle-experience[reasoning-gym]")',
                value=error,
            ) from error
        known = sorted(gym.factory.DATASETS)
        if task not in known:
            near = ", ".join(get_close_matches(task, known, n=3)) or f"{len(known)} others"
            raise InvalidFieldError(
                "source.task", limit="a task of reasoning-gym", value=f"{task}; there are {near}"
            )
        try:
            self._tasks = gym.create_dataset(task, size=size, seed=seed, **(config or {}))
        except (AssertionError, TypeError, ValueError) as error:
            raise InvalidFieldError(
                "source.config", limit=f"what {task} takes", value=error
            ) from error
        self._made = {"task": task, "size": size, "seed": seed, "config": config or {}}

    def read(self, cursor: int) -> TaskSpec | None:
        if cursor >= len(self._tasks):
            return None
        entry = self._tasks[cursor]
        # Not its metadata: JSON makes lists of tuples, and some scorers tell them apart. The grader
        # makes the same entry again.
        made: dict[str, Json] = {**self._made, "index": cursor}
        return {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": made}
