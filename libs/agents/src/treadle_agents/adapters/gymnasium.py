"""Environments of gymnasium (or of anything that registers with it), played in text."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treadle_agents.adapters.libraries import library
from treadle_agents.chat import Chat
from treadle_agents.env import Env, Result, Turn
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Json

_WHOLE_NUMBER = re.compile(r"-?\d+")


class GymnasiumEnv(Env):
    """Plays an environment of gymnasium by what the policy says.

    Shown are Text observations as they are, Discrete ones as their number, and, where the
    environment draws itself as text (`render_mode: ansi`), that picture instead of either.

    An action is read from the answer by its space:

    * Discrete: the last of the names in `actions`, as a whole word in either case; where no names
      are given, the last whole number.
    * Text: the answer itself, without space around it.

    For any other space inherit, and override `render` or `parse`.
    """

    def __init__(
        self,
        model: Path,
        environment: str,
        parameters: dict[str, Any] | None = None,
        actions: list[str] | None = None,
        system: str = "",
        unreadable: float = 0.0,
    ) -> None:
        """Makes the environment.

        Args:
            model: Hugging Face folder of the policy.
            environment: its id; `module:Id` imports the module first.
            parameters: more for its constructor, `render_mode` for one.
            actions: names of the actions of a Discrete space, in the order of their numbers.
            system: what the system says before all else; empty for nothing.
            unreadable: reward of a turn without an action; the policy is told, and goes on.

        A task may hold `seed`, `options` and `prompt`; the last is shown before the first
        observation. Raises InvalidFieldError where there is no such environment, or its spaces
        cannot be said in text.
        """
        gym = library("gymnasium", extra="gymnasium")
        self._spaces = gym.spaces
        try:
            self.environment: Any = gym.make(environment, **(parameters or {}))
        except (gym.error.Error, TypeError) as error:
            raise InvalidFieldError(
                "agent.environment", limit="an environment of gymnasium", value=error
            ) from error
        self._chat = Chat(model)
        self._names = _checked(actions or [], self.environment.action_space)
        self._system = system
        self._reward_unreadable = unreadable
        self._num_unreadable = 0
        self._check_spaces()

    def reset(self, task: Mapping[str, Json]) -> str:
        observation, _ = self.environment.reset(seed=task.get("seed"), options=task.get("options"))
        parts = [task.get("prompt"), self.render(observation), self.rule]
        shown = "\n\n".join(str(part) for part in parts if part)
        messages = [{"role": "system", "content": self._system}] if self._system else []
        return self._chat.prompt([*messages, {"role": "user", "content": shown}])

    def step(self, turn: Turn) -> Result:
        try:
            action = self.parse(self._chat.content(turn.action))
        except ValueError as error:
            return self._tell_again(str(error))
        if not self.environment.action_space.contains(action):
            return self._tell_again(f"{action!r} is no action")
        observation, reward, terminated, truncated, _ = self.environment.step(action)
        over = bool(terminated or truncated)
        return Result(
            observation="" if over else self._reply(self.render(observation)),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            metrics=self._metrics(),
        )

    def close(self) -> None:
        self.environment.close()

    def render(self, observation: Any) -> str:
        """What the policy is shown of an observation."""
        if self.environment.render_mode == "ansi":
            return str(self.environment.render())
        return str(observation)

    def parse(self, answer: str) -> Any:
        """The action that an answer means. Raises ValueError where it means none."""
        space = self.environment.action_space
        if isinstance(space, self._spaces.Text):
            return answer.strip()
        pattern = _word_of(self._names) if self._names else _WHOLE_NUMBER
        found = pattern.findall(answer)
        if not found:
            raise ValueError("there is no action in the answer")
        if self._names:
            return int(space.start) + self._names.index(found[-1].lower())
        return int(found[-1])

    @property
    def rule(self) -> str:
        """What the policy is told of actions; shown once, and again after an answer without one."""
        space = self.environment.action_space
        if self._names:
            return f"Answer with one of: {', '.join(self._names)}."
        if isinstance(space, self._spaces.Discrete):
            return f"Answer with a number from {space.start} to {space.start + space.n - 1}."
        return ""

    def _tell_again(self, why: str) -> Result:
        self._num_unreadable += 1
        told = "\n".join(filter(None, [f"Error: {why}.", self.rule]))
        return Result(self._reply(told), self._reward_unreadable, metrics=self._metrics())

    def _reply(self, text: str) -> str:
        return self._chat.reply({"role": "user", "content": text})

    def _metrics(self) -> dict[str, float]:
        return {"unreadable": float(self._num_unreadable)}

    def _check_spaces(self) -> None:
        made, said = self.environment, (self._spaces.Text, self._spaces.Discrete)
        drawn = made.render_mode == "ansi" or type(self).render is not GymnasiumEnv.render
        if not (drawn or isinstance(made.observation_space, said)):
            raise InvalidFieldError(
                "agent.environment",
                limit="Text or Discrete observations, render_mode ansi, or a class with `render`",
                value=made.observation_space,
            )
        if type(self).parse is GymnasiumEnv.parse and not isinstance(made.action_space, said):
            raise InvalidFieldError(
                "agent.environment",
                limit="Text or Discrete actions, or a class with `parse`",
                value=made.action_space,
            )


def _checked(names: list[str], space: Any) -> list[str]:
    """The names of all actions, in lower case. Raises InvalidFieldError for more or fewer."""
    lowered = [name.lower() for name in names]
    wanted = getattr(space, "n", 0)
    if names and len(set(lowered)) != wanted:
        raise InvalidFieldError(
            "agent.actions", limit=f"{wanted} different names", value=", ".join(names)
        )
    return lowered


def _word_of(names: list[str]) -> re.Pattern[str]:
    """Finds any of the names; a longer one first, since it may begin with a shorter."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)
