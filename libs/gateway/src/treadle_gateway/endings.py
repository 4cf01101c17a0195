"""What a client says at the end of its session; pure."""

from collections.abc import Mapping

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Json
from treadle_gateway.errors import RefusedError
from treadle_gateway.terms import Outcome

MAX_REASON = 4096
"""Most characters of why there is no reward."""
MAX_NUMBERS = 4096
"""Most turn rewards, and most metrics."""

_FIELDS = ("reward", "turn_rewards", "metrics", "truncated", "no_reward")


def outcome_of(body: Mapping[str, Json]) -> Outcome:
    """The outcome that a body states. Raises RefusedError naming the field that is wrong."""
    for name in body:
        if name not in _FIELDS:
            raise _wrong(name, f"one of {', '.join(_FIELDS)}")
    reward = body.get("reward")
    try:
        return Outcome(
            reward=None if reward is None else _number("reward", reward),
            turn_rewards=_numbers(body.get("turn_rewards", [])),
            metrics=_metrics(body.get("metrics", {})),
            truncated=_flag(body.get("truncated", False)),
            no_reward=_reason(body.get("no_reward", "")),
        )
    except InvalidFieldError as error:
        raise RefusedError("invalid", error.message, field=error.field) from error


def _number(name: str, value: Json) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise _wrong(name, "a number that a float holds") from error


def _numbers(value: Json) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) > MAX_NUMBERS:
        raise _wrong("turn_rewards", f"at most {MAX_NUMBERS} numbers")
    return tuple(_number(f"turn_rewards[{i}]", number) for i, number in enumerate(value))


def _metrics(value: Json) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > MAX_NUMBERS:
        raise _wrong("metrics", f"an object of at most {MAX_NUMBERS} numbers")
    return {name: _number(f"metrics.{name[:200]}", number) for name, number in value.items()}


def _flag(value: Json) -> bool:
    if not isinstance(value, bool):
        raise _wrong("truncated", "true or false")
    return value


def _reason(value: Json) -> str:
    if not isinstance(value, str) or len(value) > MAX_REASON:
        raise _wrong("no_reward", f"a reason of at most {MAX_REASON} characters")
    return value


def _wrong(field: str, expected: str) -> RefusedError:
    return RefusedError("invalid", f"{field}: expected {expected}", field=field)
