"""Fields that requests of several contracts have. Checks raise InvalidFieldError."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from treadle_core.errors import InvalidFieldError, WrongRunError
from treadle_core.ids import checked_id

E = TypeVar("E", bound=StrEnum)

_SHOWN = 128
"""Most characters of a bad value that an error repeats."""


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
    """`value` unless it is less than `least`."""
    if value < least:
        raise InvalidFieldError(field, limit=f">= {least}", value=value)
    return value


def known(field: str, number: int, numbers: Mapping[E, int]) -> E:
    """The value that has this number in a contract's enumeration."""
    for value, its in numbers.items():
        if its == number:
            return value
    expected = ", ".join(map(str, numbers.values()))
    raise InvalidFieldError(field, limit=f"one of {expected}", value=number)


def hexadecimal(field: str, value: str, digits: int, *, optional: bool = False) -> str:
    """`value` if it has `digits` lower-case hex digits, or is empty where that is allowed."""
    if not (optional and not value) and not re.fullmatch(rf"[0-9a-f]{{{digits}}}", value):
        limit = f"{digits} lower-case hex digits" + (" or empty" if optional else "")
        raise InvalidFieldError(field, limit=limit, value=repr(value[:_SHOWN]))
    return value


def wait_s(wait: Duration) -> float:
    """Seconds that a call may wait."""
    seconds = wait.seconds + wait.nanos / 1e9
    if seconds < 0:
        raise InvalidFieldError("wait", limit=">= 0", value=f"{seconds:g} s")
    return seconds


def duration(seconds: float) -> Duration:
    """`seconds` as the contracts have them."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
