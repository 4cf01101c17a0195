"""What a replica and its agent workers say to each other.

Token ids travel as the bytes of an int32 array. A worker runs code that is not ours, so what it
sends is data: bounded, and checked by whoever reads it.
"""

import dataclasses
import json
from enum import IntEnum, StrEnum
from typing import Any, cast

import numpy as np

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_agents.images.headers import NotAnImageError
from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import Shown
from treadle_agents.loop import Outcome
from treadle_core.episodes import Episode, FailureClass, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan, check_media, check_spans
from treadle_core.tickets import Sampling
from treadle_runtime.workers.framing import FrameError, Framing

MAX_MESSAGE = 4096
"""Most characters of a failure's message."""


class Say(IntEnum):
    """What a frame says; the fields follow it. `key` names an episode on its worker."""

    START = 0
    """To the worker, first: tokenizer file, name and parameters of the agent plugin, places."""
    READY = 1
    """From the worker: agents can be made; their kind."""
    REFUSED = 2
    """From the worker: they cannot; message."""
    PLAY = 3
    """To the worker: key, task as JSON, max_context, max_turns, fields of an ImageRule or None."""
    EXTEND = 4
    """From the worker: key, ids to show the policy, where images are in them, bytes of these
    images; it waits for SAMPLED."""
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


FRAMING = Framing(Say, max_bytes=64 * 1024 * 1024)


def kind_of(fields: list[Any]) -> AgentKind:
    """What READY says. Raises FrameError where it is none."""
    match fields:
        case [str(kind)] if kind in set(AgentKind):
            return AgentKind(kind)
        case _:
            raise FrameError(limit="the kind of the agents", value="something else")


def context_to_json(context: ChatContext) -> str:
    """What CONVERSE carries."""
    return json.dumps(dataclasses.asdict(context))


def context_from_json(text: str) -> ChatContext:
    """What CONVERSE carried."""
    said = json.loads(text)
    sampling = said.pop("sampling")
    biases = {int(token): bias for token, bias in sampling.pop("logit_bias").items()}
    return ChatContext(**said, sampling=Sampling(**sampling, logit_bias=biases))


def shown_to_list(shown: Shown) -> list[Any]:
    """Fields of EXTEND, without its key."""
    spans = [[span.sha256, span.start, span.length] for span in shown.media]
    images = [each.data for each in shown.pictures.values()]
    return [shown.token_ids.astype("<i4", copy=False).tobytes(), spans, images]


def shown_of(fields: list[Any]) -> Shown:
    """What EXTEND shows, checked. Raises EpisodeError where it is nothing to show."""
    match fields:
        case [bytes(raw), list(), list()] if len(raw) % 4 == 0:
            spans, images = cast("list[list[Any]]", fields[1:])
            ids = np.frombuffer(raw, "<i4").astype(np.int32, copy=False)
        case _:
            raise _broken("token ids and images")
    try:
        pictures = [Picture.of(image) for image in images]
        media = tuple(MediumSpan(*span) for span in spans)
        check_spans(media, np.zeros(ids.size, np.bool_))
        check_media([each.medium for each in pictures], [media])
    except (TypeError, InvalidFieldError, NotAnImageError) as error:
        raise _broken(f"images where they are said to be ({error})") from error
    return Shown(ids, media, {each.medium.sha256: each for each in pictures})


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
