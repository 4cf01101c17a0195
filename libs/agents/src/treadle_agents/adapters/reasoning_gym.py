"""Tasks of reasoning-gym, alone or mixed, asked in its own words and scored by its own scorers.

One data set alone needs no code at all: source `reasoning_gym`, agent and grader of that name.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle_agents.adapters.libraries import library
from treadle_agents.chat import Chat
from treadle_agents.env import Env, Result, Turn
from treadle_agents.graders import ReasoningGym
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Json


@dataclass(frozen=True, slots=True)
class Part:
    """One data set of a mixture."""

    weight: float = 1.0
    """Its share, relative to the others."""
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    """What its tasks can be told."""


class Mixture:
    """TaskSource of `size` tasks, each of a data set drawn by weight; the same for a cursor."""

    def __init__(self, parts: dict[str, Part], size: int, seed: int = 0) -> None:
        """Takes the parts by reasoning-gym's names of their data sets.

        Raises InvalidFieldError where there is none, or one that reasoning-gym does not make so.
        """
        if not parts or not all(part.weight > 0 for part in parts.values()):
            raise InvalidFieldError("source.parts", limit="data sets with weights > 0", value=parts)
        gym = library("reasoning_gym", extra="reasoning-gym")
        self._sets: dict[str, Any] = {}
        for name, part in parts.items():
            try:
                self._sets[name] = gym.create_dataset(name, size=size, seed=seed, **part.config)
            except (AssertionError, TypeError, ValueError) as error:
                raise InvalidFieldError(
                    f"source.parts.{name}", limit="a data set of reasoning-gym", value=error
                ) from error
        self._parts, self._size, self._seed = parts, size, seed

    def read(self, cursor: int) -> Mapping[str, Json] | None:
        """Task `cursor`, from 0: its `prompt`, its `answer`, and how it is made again."""
        if cursor >= self._size:
            return None
        weights = [part.weight for part in self._parts.values()]
        draw = random.Random(f"{self._seed}/{cursor}")  # noqa: S311, no secret
        (name,) = draw.choices(list(self._parts), weights)
        entry = self._sets[name][cursor]
        made: dict[str, Json] = {
            "task": name,
            "size": self._size,
            "seed": self._seed,
            "config": self._parts[name].config,
            "index": cursor,
        }
        return {"prompt": entry["question"], "answer": entry["answer"], "reasoning_gym": made}


class ReasoningGymEnv(Env):
    """One question, one answer, and the score that reasoning-gym gives it.

    Each data set has a metric of its own, `score_NAME`, so that a mixture shows what is learnt.
    """

    def __init__(self, model: Path, system: str = "default") -> None:
        """Takes reasoning-gym's name of a system prompt; empty for none.

        A task is one of the source `reasoning_gym`, or of `Mixture`. Raises InvalidFieldError where
        there is no such prompt.
        """
        prompts = library("reasoning_gym", extra="reasoning-gym").utils.SYSTEM_PROMPTS
        if system and system not in prompts:
            raise InvalidFieldError("agent.system", limit=f"one of {list(prompts)}", value=system)
        self._chat, self._grade = Chat(model), ReasoningGym()
        self._system = [{"role": "system", "content": prompts[system]}] if system else []

    def reset(self, task: Mapping[str, Json]) -> str:
        return self._chat.prompt([*self._system, {"role": "user", "content": task["prompt"]}])

    def step(self, turn: Turn) -> Result:
        made: Any = turn.task["reasoning_gym"]
        score = self._grade(self._chat.content(turn.action), turn.task)
        return Result(reward=score, terminated=True, metrics={f"score_{made['task']}": score})
