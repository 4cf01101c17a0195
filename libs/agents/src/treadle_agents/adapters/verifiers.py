"""Environments of PrimeIntellect's verifiers: their tasks, their own loop and their own rewards."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any
from uuid import uuid4

from treadle_agents.adapters.libraries import library
from treadle_agents.chat_agent import ChatAgent, ChatContext
from treadle_agents.env import Result
from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_core.tickets import Json

_EXTRA = "verifiers"


class PlayError(TreadleError):
    """An environment of verifiers could not play or score an episode, and what it said."""

    kind = Kind.UNAVAILABLE
    reason = "VERIFIERS_FAILED"


class VerifiersTasks:
    """TaskSource of the tasks of a task set, by their places in it."""

    def __init__(self, environment: dict[str, Any]) -> None:
        """Takes the environment as `VerifiersAgent`."""
        self._tasks = iter(_made(environment).taskset)
        self._read: list[dict[str, Json]] = []

    def read(self, cursor: int) -> Mapping[str, Json] | None:
        """Task `cursor`, from 0: its `index`, and its `prompt` for people to read."""
        missing = cursor + 1 - len(self._read)
        for task in islice(self._tasks, max(0, missing)):
            self._read.append({"index": len(self._read), "prompt": task.data.prompt_text})
        return self._read[cursor] if cursor < len(self._read) else None


class VerifiersAgent(ChatAgent):
    """Has an environment of verifiers play a task, with the policy behind its client.

    The reward is that of its rubric, summed over the agents that it says are to be trained; all
    that the policy said in the episode is trained on it. What it cannot play or score fails the
    episode.
    """

    def __init__(self, environment: dict[str, Any]) -> None:
        """Makes the environment.

        Args:
            environment: verifiers' own configuration: `taskset: {id: ...}`, and for each of its
                agents harness and runtime, as `agent: {harness: {id: null}, runtime: {type:
                subprocess}}`. Without a runtime verifiers takes Prime's, which is elsewhere.

        A task holds the `index` of one of its task set. Raises InvalidFieldError where verifiers
        does not take the configuration.
        """
        self._environment = _made(environment)

    async def run(self, context: ChatContext) -> Result:
        index = context.task["index"]
        view = self._environment.taskset.include(idx=[f"{index}:{int(str(index)) + 1}"])
        task = next(iter(view), None)
        if task is None:
            raise InvalidFieldError("task.index", limit="one of the task set", value=index)
        with _key(context.api_key) as variable:
            episode = await self._play(task, context, variable)
        return _result(episode)

    async def _play(self, task: Any, context: ChatContext, variable: str) -> Any:
        v1 = library("verifiers.v1", extra=_EXTRA)
        client = v1.EvalClientConfig(base_url=context.base_url, api_key_var=variable)
        async with self._environment.serving():
            return await self._environment.run_episode(
                task, v1.ModelContext(model=context.model, client=client)
            )


def _made(environment: dict[str, Any]) -> Any:
    loaders = library("verifiers.v1.utils.loaders", extra=_EXTRA)
    try:
        return loaders.load_environment(loaders.resolve_env_config(environment))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidFieldError(
            "environment", limit="what verifiers takes", value=f"{type(error).__name__}: {error}"
        ) from error


@contextmanager
def _key(api_key: str) -> Generator[str]:
    """A variable of this process that holds the key: verifiers takes keys from nowhere else."""
    variable = f"TREADLE_{uuid4().hex.upper()}"
    os.environ[variable] = api_key
    try:
        yield variable
    finally:
        del os.environ[variable]


def _result(episode: Any) -> Result:
    """What an episode was worth. Raises PlayError where it failed."""
    if not episode.ok:
        failed = [episode.last_error, *(trace.last_error for trace in episode.traces)]
        said = "; ".join(f"{each.type}: {each.message}" for each in failed if each is not None)
        raise PlayError(f"verifiers: the episode failed: {said}")
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    metrics: dict[str, float] = {"turns": float(episode.num_turns)}
    for trace in trained:
        metrics |= {name: value for name, value in trace.metrics.items() if value is not None}
    return Result(
        reward=sum(trace.reward for trace in trained),
        truncated=any(trace.is_truncated for trace in trained),
        metrics=metrics,
    )
