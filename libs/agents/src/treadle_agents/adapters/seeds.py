"""Tasks for environments that need no more of a task than a seed."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_core.tickets import Json


@dataclass(frozen=True, slots=True)
class Seeds:
    """TaskSource of tasks that hold a `seed`; `size` of them, from `first` on."""

    size: int
    first: int = 0
    prompt: str = ""
    """Said before the first observation; left out of the tasks where it is empty."""

    def read(self, cursor: int) -> Mapping[str, Json] | None:
        """Task `cursor`, from 0; None behind the last."""
        if cursor >= self.size:
            return None
        task: dict[str, Json] = {"seed": self.first + cursor}
        return {**task, "prompt": self.prompt} if self.prompt else task
