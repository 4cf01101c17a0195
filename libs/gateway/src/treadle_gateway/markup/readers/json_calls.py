"""Calls as JSON objects with a name and arguments, read while they are written."""

import json
import re
from typing import Any, cast

from treadle_gateway.markup.readers.block import Argued, Ended, Named, Step

_HEAD = re.compile(
    r'[\s,;\[\]]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[^\s])',
    re.S,
)
"""How a call begins, as good as always: then its arguments are told as they come."""

_NAME = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*")')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
_BETWEEN = re.compile(r"[\s,;\[\]]*")
_MOVES = re.compile(r'[{}\[\]"\\,]')


class JsonCalls:
    """Block of one or more JSON objects, alone, in an array, or with `;` between them.

    The text of the arguments is kept as it was said. Where it is no JSON, what there is of it is
    kept too: clients answer a call that they cannot read with an error for the policy to see.
    """

    def __init__(self, *, whole: bool = False) -> None:
        """With `whole` a call is told once its object is complete, and so with its own id."""
        self._whole = whole
        self._held = ""
        self._closed = False
        self._value: _Value | None = None  # of the arguments that are being told
        self._rest: _Value | None = None  # of the object behind its arguments

    def feed(self, text: str) -> list[Step]:
        self._held += text
        # An object is not tried again before it may be whole: its text may be long.
        self._closed = "}" in text
        steps: list[Step] = []
        while self._held and self._more(steps):
            pass
        return steps

    def end(self) -> list[Step]:
        steps: list[Step] = []
        if self._value is not None:
            steps.append(Ended())
        elif self._rest is None and (found := _NAME.search(self._held)):
            arguments = _ARGUMENTS.search(self._held, found.end())
            raw = self._held[arguments.end() :] if arguments else self._held[found.end() :]
            steps += [Named(unquoted(found[1])), *([Argued(raw)] if raw.strip() else []), Ended()]
        self._held, self._value, self._rest = "", None, None
        return steps

    def _more(self, steps: list[Step]) -> bool:
        """Reads on; False where more text is needed."""
        if self._value is not None:
            said, self._held = self._value.split(self._held)
            if said:
                steps.append(Argued(said))
            if self._value.over:
                steps.append(Ended())
                self._value, self._rest = None, _Value(inside=True)
            return self._value is None
        if self._rest is not None:
            _, self._held = self._rest.split(self._held)
            if self._rest.over:
                self._rest = None
            return self._rest is None
        if not self._whole and (found := _HEAD.match(self._held)):
            self._held = self._held[found.end() :]
            self._value = _Value()
            steps.append(Named(unquoted(found[1])))
            return True
        return self._object(steps)

    def _object(self, steps: list[Step]) -> bool:
        """Reads an object that begins in another way, once it is whole."""
        if not self._closed:
            return False
        begins = _BETWEEN.match(self._held)
        start = begins.end() if begins else 0
        try:
            found, end = json.JSONDecoder().raw_decode(self._held, start)
        except (ValueError, RecursionError):
            return False
        if not isinstance(found, dict):
            return False
        steps += _steps(cast("dict[str, Any]", found), self._held[start:end])
        self._held = self._held[end:]
        return True


class _Value:
    """Where a JSON value ends."""

    def __init__(self, *, inside: bool = False) -> None:
        """`inside`: of an object that has begun; then the value ends with it."""
        self.over = False
        self._depth = 1 if inside else 0
        self._quoted = False
        self._escaped = False

    def split(self, text: str) -> tuple[str, str]:
        """What of `text` belongs to the value, and what follows it."""
        at = 0
        if self._escaped and text:
            at, self._escaped = 1, False
        while found := _MOVES.search(text, at):
            at = found.end()
            if self._quoted and found[0] == "\\":
                if at == len(text):
                    self._escaped = True
                at += 1
            elif end := self._move(found[0], found.start()):
                self.over = True
                return text[: end - 1], text[end - 1 :]
        return text, ""

    def _move(self, mark: str, at: int) -> int:
        """One more than where the value ends; 0 while it does not."""
        if mark == '"':
            self._quoted = not self._quoted
            return at + 2 if not self._quoted and self._depth == 0 else 0
        if self._quoted:
            return 0
        if mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            if self._depth < 0:  # of a number or a name: the object around it ends
                return at + 1
            return at + 2 if self._depth == 0 else 0
        elif mark == "," and self._depth == 0:
            return at + 1
        return 0


def _steps(found: dict[str, Any], said: str) -> list[Step]:
    """What a whole object says; nothing where it is no call."""
    inner = found.get("function")
    if isinstance(inner, dict):
        found = {**found, **cast("dict[str, Any]", inner)}
    elif isinstance(inner, str):
        found = {"name": inner, **found}
    if not isinstance(found.get("name"), str):
        return []
    arguments = found.get("arguments", found.get("parameters", {}))
    raw = arguments if isinstance(arguments, str) else _raw(arguments, said)
    own = found.get("id")
    return [Named(found["name"], own if isinstance(own, str) else ""), Argued(raw), Ended()]


def _raw(arguments: Any, said: str) -> str:
    """The arguments as they were said, where they can be found."""
    decoder = json.JSONDecoder()
    for found in _ARGUMENTS.finditer(said):
        try:
            value, end = decoder.raw_decode(said, found.end())
        except ValueError:
            continue
        if value == arguments:
            return said[found.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


def unquoted(quoted: str) -> str:
    """The text that a JSON string stands for; what is between the quotes where it is none."""
    try:
        return json.loads(quoted, strict=False)
    except ValueError:
        return quoted[1:-1]
