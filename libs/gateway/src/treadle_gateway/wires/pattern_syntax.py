"""Reads a regular expression as JSON schemas have them (ECMA 262) into parts.

Characters are sets of bits: one for each of ASCII, and one for all others, which count as letters.
"""

import re
from dataclasses import dataclass
from typing import TypeAlias

MAX_GROUPS = 32
"""Groups within each other."""
MAX_COUNT = 10_000
"""Counts within each other, multiplied."""
MANY = 10
"""Counts from here on are taken for loops, where they leave a choice."""
MAX_COPIES = 8
"""Places of a part that is written out as often as its count says."""


class NotAPatternError(Exception):
    """It is no regular expression, or none that is allowed."""


@dataclass(frozen=True, slots=True)
class Symbols:
    """One character out of a set."""

    mask: int


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    nodes: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    nodes: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Loop:
    """The same any number of times."""

    node: "Node"
    optional: bool
    """Not at all, too."""


Node: TypeAlias = Symbols | Chain | Choice | Loop


def read_pattern(pattern: str) -> list[Node]:
    """The pattern, and behind it each of its looks ahead or behind as one of its own.

    Raises NotAPatternError.
    """
    parser = _Parser(pattern)
    whole = parser.choice()
    if parser.at < len(pattern):
        raise NotAPatternError("a group that never began")
    return [whole, *parser.looks]


_ALL = (1 << 129) - 1
_OTHER = 1 << 128


def _mask(characters: str) -> int:
    return sum({1 << ord(character) for character in characters})


_DIGITS = _mask("0123456789")
_LETTERS = _mask("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WORD = _DIGITS | _LETTERS | _mask("_")
_SPACE = _mask(" \t\n\r\v\f")
_DOT = _ALL & ~_mask("\n\r")
_CLASSES = {
    "d": _DIGITS,
    "D": _ALL & ~_DIGITS,
    "w": _WORD,
    "W": _ALL & ~_WORD,
    "s": _SPACE,
    "S": _ALL & ~_SPACE,
}
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "v": "\v", "f": "\f", "0": "\0"}
_NOTHING = Chain(())

_COUNT = re.compile(r"\{(\d{1,9})(,?)(\d{0,9})\}", re.ASCII)
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_PROPERTY = re.compile(r"[pP]\{([\w=]{1,64})\}", re.ASCII)
_GROUP = re.compile(r"\?(?:(:)|(<?[=!])|<[A-Za-z_$][\w$]*>|P<[A-Za-z_]\w*>)", re.ASCII)


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0
        self._depth = 0
        self._counted = 1
        """Greatest product of counts within each other, of the part that is being read."""
        self.looks: list[Node] = []

    def _peek(self) -> str:
        return self._pattern[self.at : self.at + 1]

    def _take(self) -> str:
        character = self._peek()
        if not character:
            raise NotAPatternError("it ends too early")
        self.at += 1
        return character

    def choice(self) -> Node:
        """Alternatives up to the end of a group."""
        found = [self._chain()]
        while self._peek() == "|":
            self.at += 1
            found.append(self._chain())
        return found[0] if len(found) == 1 else Choice(tuple(found))

    def _chain(self) -> Node:
        found: list[Node] = []
        while self._peek() not in ("", "|", ")"):
            found.append(self._repeated())
        return found[0] if len(found) == 1 else Chain(tuple(found))

    def _repeated(self) -> Node:
        around, self._counted = self._counted, 1
        node = self._atom()
        begun = self.at
        least, most = self._count()
        if self.at > begun and not _places(node):
            raise NotAPatternError("a quantifier of nothing")
        self._counted *= max(most or 1, 1)
        if self._counted > MAX_COUNT:
            raise NotAPatternError(f"counts beyond {MAX_COUNT}")
        self._counted = max(self._counted, around)
        return _times(node, least, most)

    def _count(self) -> tuple[int, int | None]:
        """Least and most of a quantifier, if one stands here; None is without bound."""
        character = self._peek()
        counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        stated = _COUNT.match(self._pattern, self.at)
        if character in counts and character:
            self.at += 1
            found: tuple[int, int | None] = counts[character]
        elif stated:
            self.at = stated.end()
            least = int(stated.group(1))
            most = int(stated.group(3)) if stated.group(3) else None
            found = (least, most if stated.group(2) else least)
        else:
            return 1, 1
        if self._peek() in ("?", "+"):  # lazy, or never given back
            self.at += 1
        return found

    def _atom(self) -> Node:
        character = self._take()
        if character == "(":
            return self._group()
        if character == "[":
            return Symbols(self._set())
        if character == "\\":
            return self._escaped()
        if character in "^$":
            return _NOTHING
        if character in "*+?":
            raise NotAPatternError("a quantifier of nothing")
        return Symbols(_DOT if character == "." else _single(character))

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_GROUPS:
            raise NotAPatternError(f"more than {MAX_GROUPS} groups within each other")
        looks = False
        if self._peek() == "?":
            opening = _GROUP.match(self._pattern, self.at)
            if opening is None:
                raise NotAPatternError("a group of an unknown kind")
            self.at = opening.end()
            looks = opening.group(2) is not None
        node = self.choice()
        if self._peek() != ")":
            raise NotAPatternError("a group without an end")
        self.at += 1
        self._depth -= 1
        if looks:
            self.looks.append(node)
        return _NOTHING if looks else node

    def _escaped(self) -> Node:
        character = self._peek()
        if character in ("b", "B"):
            self.at += 1
            return _NOTHING
        if character in ("k", *"123456789") and character:
            raise NotAPatternError("a reference to a group")
        return Symbols(self._escape())

    def _escape(self) -> int:
        """Set of what stands behind a backslash."""
        for form in (_HEX, _PROPERTY):
            found = form.match(self._pattern, self.at)
            if found:
                self.at = found.end()
                if form is _PROPERTY:
                    return _property(found.group(0)[0], found.group(1))
                return _single(chr(min(int(next(filter(None, found.groups())), 16), 0x10FFFF)))
        character = self._take()
        if character in _CLASSES:
            return _CLASSES[character]
        if character == "c":
            return _single(chr(ord(self._take()) % 32))
        return _single(_CONTROLS.get(character, character))

    def _set(self) -> int:
        negated = self._peek() == "^"
        self.at += negated
        mask = 0
        while self._peek() != "]":
            low = self._member()
            if self._peek() == "-" and self._pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                mask |= _between(low, self._member())
            else:
                mask |= low
        self.at += 1
        return _ALL & ~(mask & ~_OTHER) if negated else mask

    def _member(self) -> int:
        character = self._take()
        return self._escape() if character == "\\" else _single(character)


def _single(character: str) -> int:
    return 1 << ord(character) if character < "\x80" else _OTHER


def _between(low: int, high: int) -> int:
    """All from one character to another; of classes, both."""
    if low & (low - 1) or high & (high - 1):
        return low | high | _single("-")
    if low > high:
        raise NotAPatternError("a range that runs backwards")
    return (high << 1) - low


def _property(kind: str, name: str) -> int:
    """What a property of Unicode may be, roughly."""
    if kind == "P":
        return _ALL
    if name.startswith(("L", "Script", "sc", "Alpha")):
        return _LETTERS | _OTHER
    return _DIGITS | _OTHER if name.startswith("N") else _ALL & ~_WORD


def _times(node: Node, least: int, most: int | None) -> Node:
    """A part as often as its count says."""
    if most == 0:
        return _NOTHING
    if most is None:
        return Loop(node, optional=least == 0)
    if least == most and not _has_loop(node):
        return node
    if most >= MANY:
        return Loop(node, optional=least == 0)
    if _places(node) > MAX_COPIES:
        return node if least else Choice((node, _NOTHING))
    maybe = Choice((node, _NOTHING))
    return Chain((node,) * least + (maybe,) * (most - least))


def _parts(node: Node) -> list[Node]:
    """A part and all parts of it."""
    found: list[Node] = []
    waiting: list[Node] = [node]
    while waiting:
        part = waiting.pop()
        found.append(part)
        if isinstance(part, Chain | Choice):
            waiting += part.nodes
        elif isinstance(part, Loop):
            waiting.append(part.node)
    return found


def _has_loop(node: Node) -> bool:
    return any(isinstance(part, Loop) for part in _parts(node))


def _places(node: Node) -> int:
    return sum(isinstance(part, Symbols) for part in _parts(node))
