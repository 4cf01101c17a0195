"""Reading the fields of a request, checked: a RefusedError names field, limit and value."""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, NoReturn, TypeAlias, cast

from treadle_core.tickets import Json
from treadle_gateway.errors import RefusedError

Object: TypeAlias = Mapping[str, Json]

MAX_NAME = 64
"""Most characters of a name that a client made up and we repeat."""
MAX_IGNORED = 32
"""Most names of ignored fields that one request is charged with."""


def refuse(field: str, expected: str, value: object) -> NoReturn:
    """Raises the RefusedError of a field that holds a wrong value."""
    raise RefusedError("invalid", f"{field}: expected {expected}, got {shown(value)}", field=field)


def shown(value: object) -> str:
    """A value, short enough for a message."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return f"an array of {len(cast('list[Json]', value))}"
    if isinstance(value, str):
        return repr(value if len(value) <= MAX_NAME else value[:MAX_NAME] + "…")
    return json.dumps(value)[:MAX_NAME]


def as_object(value: Json, field: str) -> Object:
    """An object; null is none."""
    if not isinstance(value, dict):
        refuse(field, "an object", value)
    return value


def as_array(value: Json, field: str) -> Sequence[Json]:
    """An array; null is none."""
    if not isinstance(value, list):
        refuse(field, "an array", value)
    return value


def as_text(value: Json, field: str) -> str:
    """A string, which may be empty; null is none."""
    if not isinstance(value, str):
        refuse(field, "a string", value)
    return value


def as_name(value: Json, field: str) -> str:
    """A string of 1 to 256 characters."""
    if not isinstance(value, str) or not 1 <= len(value) <= 256:
        refuse(field, "a string of 1 to 256 characters", value)
    return value


def as_whole(value: Json, field: str, low: int, high: int) -> int:
    """A whole number within bounds; 1.0 is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(field, f"a whole number from {low} to {high}", value)
    return value


def as_number(value: Json, field: str, low: float, high: float) -> float:
    """A number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        refuse(field, f"a number from {low:g} to {high:g}", value)
    return float(value)


def nested(level: Iterable[Any]) -> list[Any]:
    """The objects and arrays right within objects and arrays."""
    found: list[Any] = []
    for value in level:
        members = cast("Iterable[Any]", value if type(value) is list else value.values())
        found += [member for member in members if type(member) in _CONTAINERS]
    return found


_CONTAINERS = frozenset({dict, list})


class Fields:
    """The object at the root of a request. Remembers which of its fields nobody asked for.

    A field that is null is absent.
    """

    def __init__(self, body: Object) -> None:
        self._body = body
        self._read: set[str] = set()

    def raw(self, name: str) -> Json:
        """Whatever it holds; None where it is absent."""
        self._read.add(name)
        return self._body.get(name)

    def stated(self, names: Set[str]) -> list[str]:
        """Those of the names that are not absent, sorted."""
        return sorted(name for name in self._body if name in names and self._body[name] is not None)

    def object(self, name: str) -> Object | None:
        """An object, if any."""
        value = self.raw(name)
        return None if value is None else as_object(value, name)

    def array(self, name: str) -> Sequence[Json] | None:
        """An array, if any."""
        value = self.raw(name)
        return None if value is None else as_array(value, name)

    def text(self, name: str) -> str | None:
        """A string, if any."""
        value = self.raw(name)
        return None if value is None else as_text(value, name)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            refuse(name, "true or false", value)
        return value

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number within bounds, if any."""
        value = self.raw(name)
        return None if value is None else as_whole(value, name, low, high)

    def number(self, name: str, low: float, high: float) -> float | None:
        """A number within bounds, if any."""
        value = self.raw(name)
        return None if value is None else as_number(value, name, low, high)

    def model(self) -> str:
        """The name of the model; every wire needs it."""
        return as_name(self.raw("model"), "model")

    def unread(self) -> tuple[str, ...]:
        """Names of the fields that nobody asked for, sorted; at most a stated number."""
        names = [name for name, value in self._body.items() if value is not None]
        return tuple(sorted(name[:MAX_NAME] for name in names if name not in self._read))[
            :MAX_IGNORED
        ]
