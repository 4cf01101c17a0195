"""Checks of request fields. Each raises InvalidFieldError naming field, limit and value."""

import math
import re
from collections.abc import Mapping, Sequence

from google.protobuf.duration_pb2 import Duration

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_core.episodes import MAX_REWARD, FailureClass, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.ids import checked_id
from treadle_experience.core.errors import WrongRunError
from treadle_experience.core.faults import Fault, FaultReason
from treadle_experience.core.state import Result
from treadle_experience.core.tickets import Attempt, Failure

MAX_WAIT_S = 30.0
MAX_ATTEMPTS = 65536
MAX_NUMBERS = 4096
"""Most metrics or turn rewards of one episode or step."""
MAX_NAME = 128

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

_TERMINATIONS = {
    episode_pb2.TERMINATION_FINISHED: Termination.FINISHED,
    episode_pb2.TERMINATION_TRUNCATED: Termination.TRUNCATED,
    episode_pb2.TERMINATION_FAILED: Termination.FAILED,
}
_FAILURE_CLASSES = {
    episode_pb2.FAILURE_CLASS_POLICY: FailureClass.POLICY,
    episode_pb2.FAILURE_CLASS_ENVIRONMENT: FailureClass.ENVIRONMENT,
    episode_pb2.FAILURE_CLASS_INFRASTRUCTURE: FailureClass.INFRASTRUCTURE,
}

_FAULT_REASONS = {
    pb.FAULT_REASON_PAYLOAD_LOST: FaultReason.PAYLOAD_LOST,
    pb.FAULT_REASON_QUARANTINED: FaultReason.QUARANTINED,
}


def check_run(served: str, run_id: str) -> None:
    """Raises WrongRunError unless the request is for the run that is served here."""
    if checked_id("run_id", run_id) != served:
        raise WrongRunError(
            f"run_id: this is run {served}, not {run_id}",
            field="run_id",
            limit=served,
            value=run_id,
        )


def at_least(field: str, value: int, least: int) -> int:
    if value < least:
        raise InvalidFieldError(field, limit=f">= {least}", value=value)
    return value


def hexadecimal(field: str, value: str, digits: int, *, optional: bool = False) -> str:
    """`value` if it has `digits` lower-case hex digits, or is empty where that is allowed."""
    if not (optional and not value) and not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
        limit = f"{digits} lower-case hex digits" + (" or empty" if optional else "")
        raise InvalidFieldError(field, limit=limit, value=repr(value[:MAX_NAME]))
    return value


def wait_s(duration: Duration) -> float:
    """Seconds that a call may wait, cut to MAX_WAIT_S."""
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds < 0:
        raise InvalidFieldError("wait", limit=">= 0", value=f"{seconds:g} s")
    return min(seconds, MAX_WAIT_S)


def relative_path(field: str, value: str) -> str:
    """`value` if it cannot leave the directory that it is relative to."""
    parts = value.split("/")
    if not value or len(value) > 1024 or "\0" in value or any(p in ("", ".", "..") for p in parts):
        raise InvalidFieldError(
            field, limit="a relative path without . or ..", value=repr(value[:MAX_NAME])
        )
    return value


def attempt(message: pb.Attempt, field: str = "attempt") -> Attempt:
    return Attempt(
        checked_id(f"{field}.episode_id", message.episode_id),
        at_least(f"{field}.attempt", message.attempt, 1),
    )


def attempts(messages: Sequence[pb.Attempt]) -> list[Attempt]:
    if len(messages) > MAX_ATTEMPTS:
        raise InvalidFieldError(
            "attempts", limit=f"at most {MAX_ATTEMPTS} entries", value=len(messages)
        )
    return [attempt(message, f"attempts[{i}]") for i, message in enumerate(messages)]


def faults(messages: Sequence[pb.EpisodeFault]) -> list[Fault]:
    """What a trainer hands a batch back for."""
    if len(messages) > MAX_ATTEMPTS:
        raise InvalidFieldError(
            "faults", limit=f"at most {MAX_ATTEMPTS} entries", value=len(messages)
        )
    found: list[Fault] = []
    for i, message in enumerate(messages):
        if message.reason not in _FAULT_REASONS:
            raise InvalidFieldError(
                f"faults[{i}].reason", limit="a known FaultReason", value=message.reason
            )
        found.append(
            Fault(
                checked_id(f"faults[{i}].episode_id", message.episode_id),
                at_least(f"faults[{i}].attempt", message.attempt, 1),
                _FAULT_REASONS[message.reason],
                message.message,
            )
        )
    return found


def numbers(field: str, values: Mapping[str, float], largest: float) -> dict[str, float]:
    """Named numbers within ±`largest`."""
    if len(values) > MAX_NUMBERS:
        raise InvalidFieldError(field, limit=f"at most {MAX_NUMBERS} entries", value=len(values))
    for name, value in values.items():
        if not 1 <= len(name) <= MAX_NAME:
            raise InvalidFieldError(
                f"{field} names", limit=f"1 to {MAX_NAME} characters", value=repr(name[:MAX_NAME])
            )
        _number(f"{field}.{name}", value, largest)
    return dict(values)


def failure(request: pb.FailEpisodeRequest) -> Failure:
    if request.failure_class not in _FAILURE_CLASSES:
        raise InvalidFieldError(
            "failure_class", limit="a known FailureClass", value=request.failure_class
        )
    return Failure(
        _FAILURE_CLASSES[request.failure_class],
        request.message,
        _traceparent("traceparent", request.traceparent),
    )


def result(message: episode_pb2.EpisodeResult) -> Result:
    """The light part of an episode; its payload is checked by `payloads.accept`."""
    if message.termination not in _TERMINATIONS:
        raise InvalidFieldError(
            "result.termination", limit="a known Termination", value=message.termination
        )
    termination = _TERMINATIONS[message.termination]
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
    )


def _turn_rewards(values: Sequence[float]) -> tuple[float, ...]:
    if len(values) > MAX_NUMBERS:
        raise InvalidFieldError(
            "result.turn_rewards", limit=f"at most {MAX_NUMBERS} entries", value=len(values)
        )
    return tuple(_number(f"result.turn_rewards[{i}]", value) for i, value in enumerate(values))


def _versions(values: Sequence[int]) -> tuple[int, ...]:
    versions = tuple(values)
    if any(number < 1 for number in versions) or list(versions) != sorted(set(versions)):
        raise InvalidFieldError(
            "result.versions", limit="distinct, ascending, >= 1", value=list(versions[:16])
        )
    return versions


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
