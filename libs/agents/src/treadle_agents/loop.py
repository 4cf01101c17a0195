"""The episode loop: an environment and a policy take turns until one of them is done."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_agents.asking import InThread, ask, ask_before_the_policy, environment
from treadle_agents.chat_agent import ChatAgent, ChatContext
from treadle_agents.checks import check_metrics, check_observation, check_result, check_sum
from treadle_agents.env import Env, Observation, Result, Turn
from treadle_agents.failures import EpisodeError
from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import Placeholder, Shown
from treadle_agents.record import Generate, Recorder
from treadle_core.episodes import Episode, FailureClass, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MAX_MEDIA
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


Extend = Callable[[Shown], Awaitable[Sampled]]
"""Shows the policy more of a session, and samples one turn (`Recorder.extend`)."""


@dataclass(frozen=True, slots=True)
class Words:
    """A tokenizer, raw: no special tokens are added, none are skipped."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    placeholder: Placeholder | None = None
    """What stands for an image; None where the policy reads none."""


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
        media=tuple(each.medium for each in recorder.pictures),
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
        num_tokens += observed.token_ids.size + sampled.token_ids.size
        action = words.decode(sampled.token_ids.tolist())
        result = await agent.step(Turn(shown, action, task, len(rewards) + 1))
        rewards.append(result.reward)
        metrics.update(result.metrics)
        check_metrics(metrics)
        truncated = result.truncated or sampled.length
        if not (truncated or result.terminated):
            shown, observed = str(result.observation), agent.shown(result.observation)
            # What the policy would never answer is not shown, so it is not recorded either.
            room = limits.max_context - num_tokens - observed.token_ids.size
            truncated = room < 1 or len(rewards) >= limits.max_turns
        if truncated or result.terminated:
            ended = Termination.TRUNCATED if truncated else Termination.FINISHED
            return _outcome(rewards, ended, metrics)


async def converse(
    agent: ChatAgent, context: ChatContext, *, in_thread: InThread = asyncio.to_thread
) -> Outcome:
    """Runs an agent that talks to the policy by itself; the caller closes it.

    Raises EpisodeError when the agent or the policy fails.
    """
    with environment():
        result = check_result(await ask(in_thread, agent.run, context))
    ended = Termination.TRUNCATED if result.truncated else Termination.FINISHED
    return Outcome(result.reward, ended, result.metrics, ())


async def make(
    constructor: Callable[[], Any], *, in_thread: InThread = asyncio.to_thread
) -> Env | ChatAgent:
    """Makes the agent of one episode. Raises EpisodeError of class environment."""
    agent = await ask_before_the_policy(in_thread, constructor)
    if not isinstance(agent, Env | ChatAgent):
        raise EpisodeError(
            FailureClass.ENVIRONMENT,
            "agent: expected a treadle_agents.Env or a treadle_agents.ChatAgent, "
            f"got {type(agent).__name__}",
        )
    return agent


async def close(agent: Env | ChatAgent, *, in_thread: InThread = asyncio.to_thread) -> None:
    """Closes `agent`; its failure is logged and changes nothing."""
    try:
        await ask(in_thread, agent.close)
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
    seen: set[str] = field(default_factory=set[str])
    """sha256 of the images so far."""

    async def prompt(self, task: Mapping[str, Json], max_context: int) -> tuple[str, Shown]:
        """The prompt as text and tokens, with room for at least one token."""
        answer = await ask_before_the_policy(self.in_thread, self.env.reset, task)
        observation = check_observation("agent.reset", answer)
        shown = self.shown(observation)
        size = shown.token_ids.size
        if not 1 <= size < max_context:
            # A prompt is never cut: what would be lost is where the instructions stand.
            raise EpisodeError(
                FailureClass.ENVIRONMENT,
                f"agent.reset: expected a prompt of 1 to {max_context - 1} tokens, got {size}",
            )
        return str(observation), shown

    async def step(self, turn: Turn) -> Result:
        result = await ask(self.in_thread, self.env.step, turn)
        with environment():
            return check_result(result)

    def shown(self, observation: str) -> Shown:
        """What was observed as the tokens that the policy is shown."""
        images = observation.images if isinstance(observation, Observation) else ()
        with environment():
            ids = np.asarray(self.words.encode(observation), np.int32)
            if self.words.placeholder is not None:
                shown = self.words.placeholder.shown(ids, [Picture.of(image) for image in images])
                self.seen.update(shown.pictures)
                if len(self.seen) > MAX_MEDIA:
                    limit = f"at most {MAX_MEDIA} in an episode"
                    raise InvalidFieldError("images", limit=limit, value=len(self.seen))
                return shown
            if images:
                limit = "none, since the policy reads no images"
                raise InvalidFieldError("images", limit=limit, value=len(images))
            return Shown(ids)
