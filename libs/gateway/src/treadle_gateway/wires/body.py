"""Bytes of a request -> JSON, checked. Whatever comes, the answer is JSON or a RefusedError."""

import json
import math
import re
from typing import Any, NoReturn

from treadle_core.tickets import Json
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.fields import nested

MAX_BYTES = 32 * 1024 * 1024
"""Of a body, decompressed."""
MAX_DEPTH = 64
"""Objects and arrays within each other."""
MAX_VALUES = 1_000_000
"""Members of all objects and arrays together."""


def parsed(body: bytes, *, max_bytes: int = MAX_BYTES) -> dict[str, Json]:
    """Returns the object that `body` states.

    Raises RefusedError where it is larger than the bounds, is not JSON (not UTF-8, NaN, a name
    twice in one object), is no object, or holds what no text holds: half a surrogate pair, NUL.
    """
    if len(body) > max_bytes:
        raise RefusedError(
            "too_large", f"body: expected at most {max_bytes} bytes, got {len(body)}", field="body"
        )
    if not _is_bounded(body):
        raise RefusedError(
            "too_large", f"body: expected at most {MAX_VALUES} values in all", field="body"
        )
    root = _loaded(body)
    if not isinstance(root, dict):
        _refuse("an object", "an array" if isinstance(root, list) else "a bare value")
    _check_depth(root)
    if _ODD_ESCAPE.search(body):
        _check_texts(root, "")
    return root


def _loaded(body: bytes) -> Json:
    if not body.strip(b" \t\r\n"):
        _refuse("JSON", "nothing")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse("UTF-8", f"byte {body[error.start]:#04x} at {error.start}")
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        _refuse("JSON", f"{error.msg} at character {error.pos}")
    except RecursionError:
        _refuse(f"a depth of at most {MAX_DEPTH}", "more")
    except ValueError as error:  # an integer of thousands of digits
        _refuse("JSON", str(error).split(";")[0])


def _refuse(expected: str, found: str) -> NoReturn:
    raise RefusedError("invalid", f"body: expected {expected}, got {found}", field="body")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuses a name that stands twice: readers differ on which of the two counts."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        _refuse("every name once in an object", f"{twice[:64]!r} twice")
    return found


def _constant(name: str) -> NoReturn:
    _refuse("JSON", name)


def _float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        _refuse("finite numbers", digits[:32])
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)

_ODD_ESCAPE = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")
"""What may state half a surrogate pair or NUL. Unescaped, neither is JSON."""

_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A string, or what is left of a broken one: never tried twice at one place."""


def _is_bounded(body: bytes) -> bool:
    """Whether its values are few enough; counted exactly only where commas are many."""
    if len(body) <= MAX_VALUES or _marks(body) <= MAX_VALUES:
        return True
    return _marks(_STRING.sub(b"", body)) <= MAX_VALUES


def _marks(body: bytes) -> int:
    return body.count(b",") + body.count(b"[") + body.count(b"{")


def _check_depth(root: Json) -> None:
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        level = nested(level)
        if not level:
            return
    _refuse(f"a depth of at most {MAX_DEPTH}", "more")


def _check_texts(value: Json, path: str) -> None:
    """Refuses texts that are none.

    What the policy itself asked a tool for is let through: a client that read it as JSON sends it
    back as it understood it.
    """
    if isinstance(value, str):
        if "\0" in value or not _is_unicode(value):
            raise RefusedError(
                "invalid",
                f"{path}: expected text without NUL and without half a surrogate pair",
                field=path,
            )
    elif isinstance(value, list):
        for place, member in enumerate(value):
            _check_texts(member, f"{path}.{place}" if path else str(place))
    elif isinstance(value, dict):
        called = value.get("type") == "tool_use"
        for name, member in value.items():
            if called and name == "input":
                continue
            _check_texts(name, "body")
            _check_texts(member, f"{path}.{name}" if path else name)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
