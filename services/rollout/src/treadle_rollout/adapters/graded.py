"""Agent `grader`: one question, one answer, and a grader that says what the answer is worth."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from treadle_agents.chat import Chat
from treadle_agents.checks import check_result
from treadle_agents.env import Env, Result, Turn
from treadle_agents.graders import Grader
from treadle_core.tickets import Json
from treadle_runtime import plugins

GROUP = "treadle.graders"


class Graded(Env):
    """Agent plugin `grader`: tasks need no code but their grader."""

    def __init__(self, model: Path, grader: str | dict[str, Any], system: str = "") -> None:
        """Takes the grader by name or path, or as `{name: ..., parameter: ...}`.

        A task holds `messages`, or a `prompt` that the user says after the `system` message.
        """
        self._chat = Chat(model)
        self._grade = grader_of(grader)
        self._system = [{"role": "system", "content": system}] if system else []

    def reset(self, task: Mapping[str, Json]) -> str:
        return self._chat.prompt([*self._system, *_messages(task)])

    def step(self, turn: Turn) -> Result:
        reward = self._grade(self._chat.content(turn.action), turn.task)
        if cast("object", reward) is None:
            raise TypeError("grader: expected a number, got None; is a return missing")
        return Result(reward=reward, terminated=True)

    def check(self, task: Mapping[str, Json]) -> None:
        """Asks and grades an answer of nothing; raises what an episode would fail with."""
        check_result(self.step(Turn(self.reset(task), "", task, 1)))


def _messages(task: Mapping[str, Json]) -> list[dict[str, Any]]:
    messages, prompt = task.get("messages"), task.get("prompt")
    if isinstance(messages, list) and all(isinstance(each, dict) for each in messages):
        return cast("list[dict[str, Any]]", messages)
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    raise TypeError(
        f"task: expected messages, or prompt as text, got {', '.join(task)}; `columns` of the "
        "source can rename what there is"
    )


def grader_of(chosen: str | dict[str, Any]) -> Grader:
    """The grader of a recipe: a class is built from its parameters, a function taken as it is."""
    settings = plugins.PluginConfig.model_validate(
        {"name": chosen} if isinstance(chosen, str) else chosen
    )
    if found := plugins.check(GROUP, settings):
        raise plugins.PluginError("; ".join(found))
    grader = plugins.load(GROUP, settings.name)
    if isinstance(grader, type):
        return plugins.build(GROUP, settings)
    if settings.parameters or not callable(grader):
        raise plugins.PluginError(f"grader {settings.name!r}: expected a class or a function alone")
    return cast("Grader", grader)
