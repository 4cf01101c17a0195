"""The episode loop: an environment and a policy take turns until one of them is done."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_agents.checks import check_metrics, check_result, check_sum, check_text
from treadle_agents.env import Env, PolicyError, Result, Turn
from treadle_agents.failures import EpisodeError, describe
from treadle_agents.record import Generate, Recorder
from treadle_core.episodes import Episode, FailureClass, Termination
from treadle_core.tickets import Json, Sampling

log = logging.getLogger(__name__)


class Sampled(Protocol):
    """What the loop needs to know of a sampled turn."""

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """What was sampled, [N]."""
        ...

    @property
    def length(self) -> bool:
        """The turn was cut short."""
        ...


Extend = Callable[[Sequence[int]], Awaitable[Sampled]]
"""Shows the policy further ids of a session, and samples one turn (`Recorder.extend`)."""
InThread = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a blocking call elsewhere; `asyncio.to_thread`, or a pool's."""


@dataclass(frozen=True, slots=True)
class Words:
    """A tokenizer, raw: no special tokens are added, none are skipped."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]


@dataclass(frozen=True, slots=True)
class Limits:
    """What ends an episode from outside."""

    max_context: int
    """Most tokens of the whole session."""
    max_turns: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """An episode's worth, without its tokens."""

    reward: float | None
    """Sum over the turns that gave one; None when none did."""
    termination: Termination
    metrics: Mapping[str, float]
    turn_rewards: tuple[float, ...]
    """Reward of each turn; empty unless every turn gave one."""


async def run_episode(
    env: Env,
    task: Mapping[str, Json],
    *,
    generate: Generate,
    words: Words,
    sampling: Sampling,
    limits: Limits,
    in_thread: InThread = asyncio.to_thread,
) -> Episode:
    """Plays and records one whole episode, and closes `env`.

    Raises EpisodeError when it fails, and whatever `generate` raises.
    """
    recorder = Recorder(generate, sampling, limits.max_context)
    try:
        outcome = await play(
            env, task, extend=recorder.extend, words=words, limits=limits, in_thread=in_thread
        )
    finally:
        await close(env, in_thread=in_thread)
    return Episode(
        segments=recorder.segments(trainable=True),
        reward=outcome.reward,
        termination=outcome.termination,
        metrics=outcome.metrics,
        turn_rewards=outcome.turn_rewards,
    )


async def play(
    env: Env,
    task: Mapping[str, Json],
    *,
    extend: Extend,
    words: Words,
    limits: Limits,
    in_thread: InThread = asyncio.to_thread,
) -> Outcome:
    """Runs the turns of one episode; the caller records them and closes `env`.

    Raises EpisodeError when the environment or the policy fails, and whatever `extend` raises.
    """
    agent = _Agent(env, words, in_thread)
    shown, observed = await agent.prompt(task, limits.max_context)
    rewards: list[float | None] = []
    metrics: dict[str, float] = {}
    num_tokens = 0
    while True:
        sampled = await extend(observed)
        num_tokens += len(observed) + sampled.token_ids.size
        action = words.decode(sampled.token_ids.tolist())
        result = await agent.step(Turn(shown, action, task, len(rewards) + 1))
        rewards.append(result.reward)
        metrics.update(result.metrics)
        check_metrics(metrics)
        truncated = result.truncated or sampled.length
        if not (truncated or result.terminated):
            shown, observed = result.observation, agent.encode(result.observation)
            # What the policy would never answer is not shown, so it is not recorded either.
            room = limits.max_context - num_tokens - len(observed)
            truncated = room < 1 or len(rewards) >= limits.max_turns
        if truncated or result.terminated:
            ended = Termination.TRUNCATED if truncated else Termination.FINISHED
            return _outcome(rewards, ended, metrics)


async def make(constructor: Callable[[], Any], *, in_thread: InThread = asyncio.to_thread) -> Env:
    """Makes the environment of one episode. Raises EpisodeError of class environment."""
    env = await _ask_before_the_policy(in_thread, constructor)
    if not isinstance(env, Env):
        raise EpisodeError(
            FailureClass.ENVIRONMENT,
            f"agent: expected a treadle_agents.Env, got {type(env).__name__}",
        )
    return env


async def close(env: Env, *, in_thread: InThread = asyncio.to_thread) -> None:
    """Closes `env`; its failure is logged and changes nothing."""
    try:
        await _ask(in_thread, env.close)
    except EpisodeError as error:
        log.warning("agent.close failed: %s", error.message)


def _outcome(
    rewards: Sequence[float | None], ended: Termination, metrics: Mapping[str, float]
) -> Outcome:
    given = [reward for reward in rewards if reward is not None]
    return Outcome(
        reward=check_sum(sum(given)) if given else None,
        termination=ended,
        metrics=metrics,
        turn_rewards=tuple(given) if len(given) == len(rewards) else (),
    )


@dataclass(frozen=True, slots=True)
class _Agent:
    """An environment whose answers are checked; it raises nothing but EpisodeError."""

    env: Env
    words: Words
    in_thread: InThread

    async def prompt(self, task: Mapping[str, Json], max_context: int) -> tuple[str, Sequence[int]]:
        """The prompt as text and ids, with room for at least one token."""
        answer = await _ask_before_the_policy(self.in_thread, self.env.reset, task)
        text = check_text("agent.reset", answer)
        ids = self.encode(text)
        if not 1 <= len(ids) < max_context:
            # A prompt is never cut: what would be lost is where the instructions stand.
            raise EpisodeError(
                FailureClass.ENVIRONMENT,
                f"agent.reset: expected a prompt of 1 to {max_context - 1} tokens, got {len(ids)}",
            )
        return text, ids

    async def step(self, turn: Turn) -> Result:
        result = await _ask(self.in_thread, self.env.step, turn)
        with _environment():
            return check_result(result)

    def encode(self, text: str) -> Sequence[int]:
        with _environment():
            return self.words.encode(text)


async def _ask(in_thread: InThread, method: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a method of an environment, plain or async."""
    with _environment():
        if inspect.iscoroutinefunction(method):
            return await method(*arguments)
        answer, error = await in_thread(lambda: _attempt(method, *arguments))
        if error is not None:
            raise error
        return await answer if inspect.isawaitable(answer) else answer


async def _ask_before_the_policy(
    in_thread: InThread, method: Callable[..., Any], *arguments: Any
) -> Any:
    """Like `_ask`, where the policy has not said anything that could be its failure."""
    try:
        return await _ask(in_thread, method, *arguments)
    except EpisodeError as error:
        if error.failure_class is not FailureClass.POLICY:
            raise
        raise EpisodeError(FailureClass.ENVIRONMENT, error.message) from error


def _attempt(method: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Returns what was raised: a future takes no StopIteration, and a loop ends at SystemExit."""
    try:
        return method(*arguments), None
    except BaseException as error:  # noqa: BLE001, raised again by the caller
        return None, error


@contextlib.contextmanager
def _environment() -> Generator[None]:
    """Turns whatever an environment raises into EpisodeError, except our own cancellation."""
    try:
        yield
    except (EpisodeError, GeneratorExit):
        raise
    except PolicyError as error:
        raise EpisodeError(FailureClass.POLICY, describe(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EpisodeError(FailureClass.ENVIRONMENT, describe(error)) from error
    except BaseException as error:
        raise EpisodeError(FailureClass.ENVIRONMENT, describe(error)) from error
