"""JSON schemas that clients send, checked before anything works on them.

A schema is data to us until an engine compiles it to a grammar; these bounds keep that finite.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeAlias, cast

from treadle_core.tickets import Json
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.fields import nested
from treadle_gateway.wires.patterns import check_pattern

MAX_BYTES = 64 * 1024
"""Of one schema, as compact JSON."""
MAX_DEPTH = 16
"""Schemas within each other; each is at most two levels of JSON below the one around it."""
MAX_EXPANDED = 10_000
"""Objects of a schema once every reference is replaced by what it names."""


def check_schema(schema: Mapping[str, Json], field: str) -> None:
    """Raises RefusedError where a schema could cost more than it may.

    It is too large or too deep, refers to itself or elsewhere, or has a `pattern` without an end.
    """
    text = json.dumps(schema, separators=(",", ":"))
    if len(text) > MAX_BYTES:
        _refuse(field, f"a schema of at most {MAX_BYTES} bytes", str(len(text)))
    fault = _fault(text)
    if fault != _FIT:
        _refuse(field, *fault)


def _refuse(field: str, expected: str, found: str) -> None:
    raise RefusedError("invalid", f"{field}: expected {expected}, got {found}", field=field)


Fault: TypeAlias = tuple[str, str]
"""What was expected of a schema and what was found."""

_FIT: Fault = ("", "")


@lru_cache(maxsize=256)
def _fault(text: str) -> Fault:
    """What is wrong with a schema.

    Remembered, since an agent sends the same tools with every request.
    """
    root = json.loads(text)
    references: list[str] = []
    level: list[Any] = [root]
    for _ in range(2 * MAX_DEPTH):
        for value in level:
            fault = _read_keywords(value, references)
            if fault != _FIT:
                return fault
        level = nested(level)
        if not level:
            return _references_fault(root, references)
    return f"at most {MAX_DEPTH} schemas within each other", "more"


def _read_keywords(node: Any, references: list[str]) -> Fault:
    """Checks what one object of a schema says by itself; adds what it refers to."""
    if not isinstance(node, dict):
        return _FIT
    stated = cast("dict[str, Any]", node)
    reference = stated.get("$ref")
    if isinstance(reference, str):
        if not reference.startswith("#"):
            return "references within the schema", repr(reference[:64])
        references.append(reference)
    patterns: list[str] = []
    if isinstance(stated.get("pattern"), str):
        patterns.append(stated["pattern"])
    if isinstance(stated.get("patternProperties"), dict):
        patterns += stated["patternProperties"]
    for pattern in patterns:
        fault = check_pattern(pattern)
        if fault:
            return "a pattern that ends in time", f"{pattern[:64]!r} ({fault})"
    return _FIT


def _references_fault(root: Any, references: list[str]) -> Fault:
    """Follows references; each place is measured once."""
    sizes: dict[str, int] = {}
    for reference in references:
        if reference not in sizes:
            fault = _measure(root, reference, sizes)
            if fault != _FIT:
                return fault
    total = _size(root, sizes)
    if total > MAX_EXPANDED:
        return f"at most {MAX_EXPANDED} objects once references are replaced", str(total)
    return _FIT


_OPEN = -1
"""Size of a place whose measuring has begun."""


def _measure(root: Any, reference: str, sizes: dict[str, int]) -> Fault:
    """Puts the expanded size of a place, and of those that it refers to, into `sizes`."""
    waiting = [reference]
    while waiting:
        place = waiting[-1]
        node = _named(root, place)
        if node is None:
            return "references to what is there", repr(place[:64])
        inner = [name for name in _references_in(node) if sizes.get(name, _OPEN) == _OPEN]
        if not inner:
            sizes[place] = min(_size(node, sizes), MAX_EXPANDED + 1)
            waiting.pop()
            continue
        again = [name for name in inner if name in sizes]
        if again or place in inner:
            return "no schema within itself", f"$ref {(again or [place])[0][:64]!r}"
        sizes[place] = _OPEN
        waiting.append(inner[0])
    return _FIT


def _named(root: Any, reference: str) -> Any:
    """What a reference `#/a/b` names; None where nothing is there."""
    node = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            node = node[int(key) if isinstance(node, list) else key]
        except (LookupError, TypeError, ValueError):
            return None
    if isinstance(node, bool):
        return {}
    return cast("Any", node) if isinstance(node, dict) else None


def _objects_in(node: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    waiting: list[Any] = [node]
    while waiting:
        value = waiting.pop()
        waiting += nested([value])
        if isinstance(value, dict):
            found.append(cast("dict[str, Any]", value))
    return found


def _references_in(node: Any) -> list[str]:
    named = [value.get("$ref") for value in _objects_in(node)]
    return [name for name in named if isinstance(name, str)]


def _size(node: Any, sizes: dict[str, int]) -> int:
    objects = _objects_in(node)
    return len(objects) + sum(sizes.get(name, 0) for name in _references_in(node))
