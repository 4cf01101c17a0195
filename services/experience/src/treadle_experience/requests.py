"""Checks of request fields. Each raises InvalidFieldError naming field, limit and value."""

import math
import re
from collections.abc import Mapping, Sequence

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_core.episodes import MAX_REWARD, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.faults import Fault, FaultReason
from treadle_core.ids import checked_id
from treadle_experience.core.state import Attempt, Result
from treadle_experience.core.tickets import Failure
from treadle_payloads.media import media_from_wire
from treadle_payloads.outcomes import FAILURE_CLASSES, TERMINATIONS
from treadle_payloads.store import is_node
from treadle_runtime.fields import at_least, hexadecimal, known

MAX_ATTEMPTS = 65536
MAX_NUMBERS = 4096
"""Most metrics or turn rewards of one episode or step."""
MAX_NAME = 128

_FAULT_REASONS = {
    FaultReason.PAYLOAD_LOST: pb.FAULT_REASON_PAYLOAD_LOST,
    FaultReason.QUARANTINED: pb.FAULT_REASON_QUARANTINED,
}
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def relative_path(field: str, value: str) -> str:
    """`value` if it cannot leave the directory that it is relative to."""
    parts = value.split("/")
    if not value or len(value) > 1024 or "\0" in value or any(p in ("", ".", "..") for p in parts):
        raise InvalidFieldError(
            field, limit="a relative path without . or ..", value=repr(value[:MAX_NAME])
        )
    return value


def attempt(message: pb.Attempt | pb.EpisodeFault, field: str = "attempt") -> Attempt:
    return Attempt(
        checked_id(f"{field}.episode_id", message.episode_id),
        at_least(f"{field}.attempt", message.attempt, 1),
    )


def attempts(messages: Sequence[pb.Attempt]) -> list[Attempt]:
    _at_most("attempts", len(messages), MAX_ATTEMPTS)
    return [attempt(message, f"attempts[{i}]") for i, message in enumerate(messages)]


def keys(field: str, values: Sequence[str]) -> list[str]:
    """Keys of payloads."""
    _at_most(field, len(values), MAX_ATTEMPTS)
    return [hexadecimal(f"{field}[{i}]", value, 64) for i, value in enumerate(values)]


def faults(messages: Sequence[pb.EpisodeFault]) -> list[Fault]:
    """What a trainer hands a batch back for."""
    _at_most("faults", len(messages), MAX_ATTEMPTS)
    found: list[Fault] = []
    for i, message in enumerate(messages):
        reason = known(f"faults[{i}].reason", message.reason, _FAULT_REASONS)
        at = attempt(message, f"faults[{i}]")
        found.append(Fault(at.episode_id, at.attempt, reason, message.message))
    return found


def numbers(field: str, values: Mapping[str, float], largest: float) -> dict[str, float]:
    """Named numbers within ±`largest`."""
    _at_most(field, len(values), MAX_NUMBERS)
    for name, value in values.items():
        if not 1 <= len(name) <= MAX_NAME:
            raise InvalidFieldError(
                f"{field} names", limit=f"1 to {MAX_NAME} characters", value=repr(name[:MAX_NAME])
            )
        _number(f"{field}.{name}", value, largest)
    return dict(values)


def failure(request: pb.FailEpisodeRequest) -> Failure:
    return Failure(
        known("failure_class", request.failure_class, FAILURE_CLASSES),
        request.message,
        _traceparent("traceparent", request.traceparent),
    )


def result(message: episode_pb2.EpisodeResult) -> Result:
    """The light part of an episode; its payload is checked by `custody`."""
    termination = known("result.termination", message.termination, TERMINATIONS)
    reward = _number("result.reward", message.reward) if message.HasField("reward") else None
    if termination is Termination.FAILED and reward is None:
        raise InvalidFieldError("result.reward", limit="set for a failed episode", value="absent")
    num_tokens = at_least("result.num_tokens", message.num_tokens, 1)
    num_trained = at_least("result.num_trained", message.num_trained, 0)
    if num_trained > num_tokens:
        raise InvalidFieldError("result.num_trained", limit=f"<= {num_tokens}", value=num_trained)
    return Result(
        reward=reward,
        termination=termination,
        metrics=numbers("result.metrics", message.metrics, MAX_REWARD),
        turn_rewards=_turn_rewards(message.turn_rewards),
        num_tokens=num_tokens,
        num_trained=num_trained,
        versions=_versions(message.versions),
        traceparent=_traceparent("result.traceparent", message.traceparent),
        sha256=hexadecimal("result.payload.sha256", message.payload.sha256, 64),
        size=at_least("result.payload.size", message.payload.size, 1),
        inlined=message.payload.HasField("inline"),
        node=_node(message.payload.node),
        node_epoch=at_least("result.payload.epoch", message.payload.epoch, 0),
        media=media_from_wire(message.media, "result.media"),
    )


def _node(value: str) -> str:
    if not is_node(value):
        limit = "unix:/path, host:port or empty"
        raise InvalidFieldError("result.payload.node", limit=limit, value=repr(value[:MAX_NAME]))
    return value


def _turn_rewards(values: Sequence[float]) -> tuple[float, ...]:
    _at_most("result.turn_rewards", len(values), MAX_NUMBERS)
    return tuple(_number(f"result.turn_rewards[{i}]", value) for i, value in enumerate(values))


def _versions(values: Sequence[int]) -> tuple[int, ...]:
    versions = tuple(values)
    if any(number < 1 for number in versions) or list(versions) != sorted(set(versions)):
        raise InvalidFieldError(
            "result.versions", limit="distinct, ascending, >= 1", value=list(versions[:16])
        )
    return versions


def _at_most(field: str, entries: int, most: int) -> None:
    if entries > most:
        raise InvalidFieldError(field, limit=f"at most {most} entries", value=entries)


def _number(field: str, value: float, largest: float = MAX_REWARD) -> float:
    if not (math.isfinite(value) and abs(value) <= largest):
        raise InvalidFieldError(field, limit=f"a number within ±{largest:g}", value=value)
    return value


def _traceparent(field: str, value: str) -> str:
    if value and not _TRACEPARENT.fullmatch(value):
        raise InvalidFieldError(
            field, limit="a W3C traceparent or empty", value=repr(value[:MAX_NAME])
        )
    return value
