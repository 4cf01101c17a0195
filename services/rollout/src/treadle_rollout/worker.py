"""Process that agents run in: `python -m treadle_rollout.worker FD`, FD being a socket.

It hosts many episodes at once and holds neither weights nor records: token ids come and go over
the socket, and the replica keeps what was sampled; an agent that talks by itself goes to the
gateway. It ends, with all that its agents started, when the replica is gone.
"""

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle_agents.chat_agent import ChatAgent
from treadle_agents.env import Env
from treadle_agents.failures import EpisodeError, describe
from treadle_agents.images.placeholders import ImageRule, Shown, placeholder_of
from treadle_agents.loop import Limits, Outcome, Words, close, converse, make, play
from treadle_core.episodes import FailureClass
from treadle_rollout.frames import (
    FRAMING,
    AgentKind,
    Say,
    context_from_json,
    shown_to_list,
)
from treadle_rollout.words import words_of
from treadle_runtime.plugins import PluginConfig, factory, load
from treadle_runtime.workers import program
from treadle_runtime.workers.framing import FrameError, Packer

log = logging.getLogger(__name__)

T = TypeVar("T")

STALLED_S = 30.0
"""A loop that does not turn for so long is held by an agent; the process says where and ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What was sampled, as far as the loop needs it."""

    token_ids: NDArray[np.int32]
    length: bool


@dataclass(slots=True)
class Episode:
    """One episode of this process."""

    key: int
    packer: Packer[Say]
    task: "asyncio.Task[None] | None" = None
    sampled: "asyncio.Future[Turn] | None" = None

    async def extend(self, observed: Shown) -> Turn:
        """Asks the replica for a turn."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # an agent caught what was to end it
            raise asyncio.CancelledError
        self.sampled = asyncio.get_running_loop().create_future()
        self.packer.send(Say.EXTEND, self.key, *shown_to_list(observed))
        return await self.sampled


@dataclass(slots=True)
class Host:
    """Runs the episodes that the replica asks for."""

    packer: Packer[Say]
    words: Words
    model: Path
    """Folder of the policy, as far as it has to do with words."""
    constructor: Callable[[], Any]
    threads: ThreadPoolExecutor
    _episodes: dict[int, Episode] = field(default_factory=dict[int, Episode], init=False)

    def handle(self, say: Say, fields: list[Any]) -> None:
        """Acts on one frame of the replica; what concerns an ended episode is ignored."""
        key = fields[0]
        if say in (Say.PLAY, Say.CONVERSE):
            episode = self._episodes[key] = Episode(key, self.packer)
            run = self._play if say is Say.PLAY else self._converse
            episode.task = asyncio.create_task(self._run(episode, partial(run, *fields[1:])))
            episode.task.add_done_callback(lambda _: self._close(key))
        elif (known := self._episodes.get(key)) is None:
            return
        elif say is Say.SAMPLED and known.sampled is not None and not known.sampled.done():
            known.sampled.set_result(Turn(np.frombuffer(fields[1], "<i4"), fields[2]))
        elif say is Say.CANCEL and known.task is not None:
            known.task.cancel()

    def _close(self, key: int) -> None:
        del self._episodes[key]
        self.packer.send(Say.CLOSED, key)

    async def _run(
        self, episode: Episode, run: "Callable[[Env | ChatAgent, Episode], Awaitable[Outcome]]"
    ) -> None:
        agent: Env | ChatAgent | None = None
        try:
            agent = await make(self.constructor, in_thread=self._in_thread)
            outcome = await run(agent, episode)
            self.packer.send(
                Say.ENDED,
                episode.key,
                outcome.reward,
                outcome.termination.value,
                outcome.metrics,
                outcome.turn_rewards,
            )
        except EpisodeError as error:
            self.packer.send(Say.FAILED, episode.key, error.failure_class.value, error.message)
        finally:
            if agent is not None:
                await close(agent, in_thread=self._in_thread)

    async def _play(
        self,
        task: str,
        max_context: int,
        max_turns: int,
        images: dict[str, int] | None,
        agent: Env | ChatAgent,
        episode: Episode,
    ) -> Outcome:
        words = self.words
        if images is not None:
            words = replace(words, placeholder=_placeholder(self.model, ImageRule(**images)))
        return await play(
            _of_kind(agent, Env),
            json.loads(task),
            extend=episode.extend,
            words=words,
            limits=Limits(max_context, max_turns),
            in_thread=self._in_thread,
        )

    async def _converse(self, context: str, agent: Env | ChatAgent, episode: Episode) -> Outcome:
        return await converse(
            _of_kind(agent, ChatAgent), context_from_json(context), in_thread=self._in_thread
        )

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        """Runs a blocking call; a thread cannot be stopped, so cancelling waits for its end."""
        running = asyncio.get_running_loop().run_in_executor(self.threads, call)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({running})
            raise


class Line(asyncio.Protocol):
    """The socket to the replica."""

    def __init__(self, handle: Callable[[Say, list[Any]], None]) -> None:
        self._handle = handle
        self._unpacker = FRAMING.unpacker()

    def data_received(self, data: bytes) -> None:
        for say, fields in self._unpacker.feed(data):
            self._handle(say, fields)

    def connection_lost(self, exc: Exception | None) -> None:
        end_group()


def end_group() -> None:
    """Ends this process at once, with whatever its agents started."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def agent_of(name: str, parameters: dict[str, Any], model: Path) -> Callable[[], Any]:
    """What makes the agent of an episode; one that takes `model` is given the policy's folder."""
    group = "treadle.agents"
    takes_model = "model" in inspect.signature(load(group, name)).parameters
    provided = {"model": model} if takes_model else {}
    return factory(group, PluginConfig(name=name, **{**provided, **parameters}))


_placeholder = cache(placeholder_of)


def _of_kind(agent: Env | ChatAgent, kind: type[T]) -> T:
    """Raises EpisodeError where a constructor makes agents of one kind, then of the other."""
    if not isinstance(agent, kind):
        expected = f"{kind.__name__} as the first one"
        message = f"agent: expected a {expected}, got {type(agent).__name__}"
        raise EpisodeError(FailureClass.ENVIRONMENT, message)
    return agent


def refusal(error: BaseException) -> str:
    """Why there is no agent: where it arose first, and the reason at the end, where it is read."""
    told = error.message if isinstance(error, EpisodeError) else describe(error)
    reason, *where = told.split("\n  ")
    return "\n  ".join(["it could not be made", *where]) + f"\n{reason}"


async def serve(line: socket.socket) -> None:
    """Serves the replica until it is gone."""
    loop = asyncio.get_running_loop()
    started: asyncio.Future[list[Any]] = loop.create_future()
    host: Host | None = None

    def handle(say: Say, fields: list[Any]) -> None:
        if host is not None:
            host.handle(say, fields)
        elif say is Say.START:
            started.set_result(fields)
        else:
            raise FrameError(limit="START first", value=say.name)

    transport, _ = await loop.create_connection(lambda: Line(handle), sock=line)
    packer = FRAMING.packer(transport)
    tokenizer, name, parameters, places = await started
    try:
        constructor = agent_of(name, json.loads(parameters), Path(tokenizer).parent)
        first = await make(constructor)
        await close(first)
        kind = AgentKind.ENV if isinstance(first, Env) else AgentKind.CHAT
        words = words_of(tokenizer)
    except BaseException as error:  # noqa: BLE001, whatever importing an agent raises is told
        packer.send(Say.REFUSED, refusal(error))
        packer.flush()
        transport.close()
    else:
        threads = ThreadPoolExecutor(places, "agent")
        host = Host(packer, words, Path(tokenizer).parent, constructor, threads)
        packer.send(Say.READY, kind.value)
    await program.stay(STALLED_S)


def main() -> None:
    """Takes the socket and serves."""
    program.run("agents", serve)
    end_group()


if __name__ == "__main__":
    main()
