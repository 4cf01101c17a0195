"""What a replica and its agent workers say to each other over a socket: framed msgpack lists.

A frame is its length as uint32, little-endian, then one msgpack list whose first element is a Say.
Token ids travel as the bytes of an int32 array. A worker runs code that is not ours, so what it
sends is data: bounded, and checked by whoever reads it.
"""

import asyncio
import dataclasses
import json
import struct
from collections.abc import Iterator
from enum import IntEnum, StrEnum
from typing import Any, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_agents.loop import Outcome
from treadle_core.episodes import Episode, FailureClass, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling

MAX_FRAME = 64 * 1024 * 1024
"""Most bytes of one frame."""
MAX_MESSAGE = 4096
"""Most characters of a failure's message."""

_LENGTH = struct.Struct("<I")


class Say(IntEnum):
    """What a frame says; the fields follow it. `key` names an episode on its worker."""

    START = 0
    """To the worker, first: tokenizer file, name and parameters of the agent plugin, places."""
    READY = 1
    """From the worker: agents can be made; their kind."""
    REFUSED = 2
    """From the worker: they cannot; message."""
    PLAY = 3
    """To the worker: key, task as JSON, max_context, max_turns."""
    EXTEND = 4
    """From the worker: key, ids to show the policy; it waits for SAMPLED."""
    SAMPLED = 5
    """To the worker: key, sampled ids, whether the turn was cut short."""
    ENDED = 6
    """From the worker: key, reward or None, termination, metrics, rewards of turns."""
    FAILED = 7
    """From the worker: key, failure class, message."""
    CLOSED = 8
    """From the worker: key; its environment is closed and its place is free."""
    CANCEL = 9
    """To the worker: key; end the episode."""
    CONVERSE = 10
    """To the worker: key, context of an agent that talks by itself, as JSON."""


class AgentKind(StrEnum):
    """Who owns an episode's loop."""

    ENV = "env"
    """We do: PLAY, then EXTEND and SAMPLED."""
    CHAT = "chat"
    """The agent does, and talks to the gateway: CONVERSE."""


class FrameError(Exception):
    """The peer sent what is no frame."""


def pack(say: Say, *fields: Any) -> bytes:
    """One frame. Raises FrameError when it is too long."""
    body = cast("bytes", msgpack.packb([int(say), *fields]))
    if len(body) > MAX_FRAME:
        raise FrameError(f"frame {say.name}: expected at most {MAX_FRAME} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Say, list[Any]]]:
        """Yields the frames that are complete. Raises FrameError at the first bad one."""
        self._rest += data
        start = 0
        while len(self._rest) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._rest, start)
            if size > MAX_FRAME:
                raise FrameError(f"a frame: expected at most {MAX_FRAME} bytes, got {size}")
            end = start + _LENGTH.size + size
            if len(self._rest) < end:
                break
            yield _parse(bytes(self._rest[start + _LENGTH.size : end]))
            start = end
        del self._rest[:start]


class Packer:
    """Writes frames to a transport; those of one turn of the loop in one piece."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._waiting: list[bytes] = []

    def send(self, say: Say, *fields: Any) -> None:
        """Sends a frame soon; a transport that is closed swallows it. Raises FrameError."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(pack(say, *fields))

    def flush(self) -> None:
        """Writes what waits."""
        if self._waiting and not self._transport.is_closing():
            self._transport.write(b"".join(self._waiting))
        self._waiting.clear()


def _parse(body: bytes) -> tuple[Say, list[Any]]:
    try:
        message = cast("list[Any]", msgpack.unpackb(body))
        return Say(message[0]), message[1:]
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise FrameError(f"not a frame: {error}") from error


def kind_of(fields: list[Any]) -> AgentKind:
    """What READY says. Raises FrameError where it is none."""
    match fields:
        case [str(kind)] if kind in set(AgentKind):
            return AgentKind(kind)
        case _:
            raise FrameError("expected the kind of the agents")


def context_to_json(context: ChatContext) -> str:
    """What CONVERSE carries."""
    return json.dumps(dataclasses.asdict(context))


def context_from_json(text: str) -> ChatContext:
    """What CONVERSE carried."""
    said = json.loads(text)
    sampling = said.pop("sampling")
    biases = {int(token): bias for token, bias in sampling.pop("logit_bias").items()}
    return ChatContext(**said, sampling=Sampling(**sampling, logit_bias=biases))


def ids_of(fields: list[Any]) -> NDArray[np.int32]:
    """Token ids of EXTEND. Raises EpisodeError where there are none."""
    match fields:
        case [bytes(raw)] if len(raw) % 4 == 0:
            return np.frombuffer(raw, "<i4").astype(np.int32, copy=False)
        case _:
            raise _broken("token ids")


def outcome_of(fields: list[Any]) -> Outcome:
    """What ENDED reports, checked. Raises EpisodeError where it is no outcome."""
    try:
        reward, ended, metrics, turn_rewards = fields
        outcome = Outcome(
            reward=None if reward is None else float(reward),
            termination=Termination(ended),
            metrics={str(name): float(number) for name, number in metrics.items()},
            turn_rewards=tuple(map(float, turn_rewards)),
        )
        Episode((), outcome.reward, outcome.termination, outcome.metrics, outcome.turn_rewards)
    except (ValueError, TypeError, AttributeError, OverflowError, InvalidFieldError) as error:
        raise _broken(f"an outcome ({error})") from error
    return outcome


def failure_of(fields: list[Any]) -> EpisodeError:
    """What FAILED reports; an episode that only closed has failed too."""
    match fields:
        case [str(failure_class), str(message)] if failure_class in set(FailureClass):
            return EpisodeError(FailureClass(failure_class), message[:MAX_MESSAGE])
        case _:
            return _broken("an outcome or a failure")


def _broken(expected: str) -> EpisodeError:
    return EpisodeError(FailureClass.ENVIRONMENT, f"the agent worker: expected {expected}")
