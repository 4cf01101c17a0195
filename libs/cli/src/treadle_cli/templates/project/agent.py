"""The environment: it thinks of a number from 1 to 7, and says whether a guess is too low or high.

Three guesses are enough for whoever halves what is left, and nobody tells the policy so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grader import grade

from treadle_agents import Env, Result, Turn
from treadle_agents.chat import Chat

MAX_GUESSES = 3


class Guessing(Env):
    """One game. `treadle train` gives it the policy's folder as `model`."""

    def __init__(self, model: Path) -> None:
        self._chat = Chat(model)

    def reset(self, task: Mapping[str, Any]) -> str:
        """The first thing that the policy reads."""
        return self._chat.prompt([{"role": "user", "content": task["prompt"]}])

    def step(self, turn: Turn) -> Result:
        """Acts on what the policy said: ends the game with a reward, or shows the next hint."""
        guess = self._chat.content(turn.action)
        reward = grade(guess, turn.task)
        if reward == 1 or turn.number == MAX_GUESSES or guess not in set("1234567"):
            return Result(reward=reward, terminated=True, metrics={"guesses": turn.number})
        hint = "more" if int(guess) < turn.task["answer"] else "less"
        return Result(observation=self._chat.reply({"role": "user", "content": hint}))
