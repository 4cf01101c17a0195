"""Server-sent events as bytes."""

import json
from typing import Any

from treadle_core.tickets import Json

COMMENT = b": ping\n\n"
"""A line that every reader of events skips."""


_ENCODER = json.JSONEncoder(separators=(",", ":"))


def dumps(value: Any) -> str:
    """Compact JSON in ASCII: some clients end lines at what Unicode calls a line separator."""
    return _ENCODER.encode(value)


def data(value: Json) -> bytes:
    """An event without a name."""
    return f"data: {dumps(value)}\n\n".encode("ascii")


def named(name: str, value: Json) -> bytes:
    """An event with a name."""
    return f"event: {name}\ndata: {dumps(value)}\n\n".encode("ascii")
