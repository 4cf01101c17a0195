"""Counting dark squares as an environment: whoever is wrong is shown the board from nearer by."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drawing import NEAR, drawn

from treadle_agents import Env, Observation, Result, Turn
from treadle_agents.chat import Chat
from treadle_core.tickets import Json


class Counting(Env):
    """The reward is 1 for the right number at once, 0.5 at the second look, and 0 for others."""

    def __init__(self, model: Path) -> None:
        """`model` is the folder of the policy, whose markup is written."""
        self._chat = Chat(model)

    def reset(self, task: Mapping[str, Json]) -> str:
        (image,) = _list(task["images"])
        prompt = self._chat.prompt([asking("How many are dark?")])
        return Observation(prompt, [base64.b64decode(str(image))])

    def step(self, turn: Turn) -> Result:
        if self._chat.content(turn.action) == str(turn.task["squares"]):
            return Result(reward=1 / turn.number, terminated=True)
        if turn.number > 1:
            return Result(reward=0.0, terminated=True)
        nearer = drawn(int(str(turn.task["squares"])), NEAR)
        more = self._chat.reply(asking("Look again."))
        return Result(observation=Observation(more, [nearer]))


def asking(words: str) -> dict[str, Any]:
    """What a user says beside a picture."""
    return {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}


def _list(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []
