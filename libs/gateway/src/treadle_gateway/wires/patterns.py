"""Regular expressions in schemas: is there a text on which one may try exponentially many ways?

A pattern is read as an automaton with one state for each place of a character. It is ambiguous
where a loop leads from a state back to it on two different ways over the same text; then a matcher
that goes back may double its work with every character. Counts above a few are taken for loops.
"""

from dataclasses import dataclass, field

from treadle_gateway.wires.pattern_syntax import (
    Chain,
    Choice,
    Loop,
    Node,
    NotAPatternError,
    Symbols,
    read_pattern,
)

MAX_LENGTH = 1024
"""Characters."""
MAX_STATES = 512
MAX_STEPS = 50_000
"""Of the search for two ways; a pattern that needs more is refused as well."""


def check_pattern(pattern: str) -> str:
    """What is wrong with a pattern; empty where it is fit."""
    if len(pattern) > MAX_LENGTH:
        return f"more than {MAX_LENGTH} characters"
    try:
        alternatives = read_pattern(pattern)
    except NotAPatternError as error:
        return str(error)
    for node in alternatives:
        automaton = _Automaton()
        automaton.add(node)
        if len(automaton.symbols) > MAX_STATES:
            return "too many places"
        if automaton.is_ambiguous():
            return "a loop within a loop over the same text"
    return ""


@dataclass(slots=True)
class _Ends:
    """Where a part of a pattern begins and ends."""

    first: list[int]
    last: list[int]
    empty: bool
    """It matches the empty text."""


@dataclass(slots=True)
class _Automaton:
    """States are places of characters; an edge says that one may come behind the other."""

    symbols: list[int] = field(default_factory=list[int])
    """What stands at each place, as a set of bits."""
    follow: list[set[int]] = field(default_factory=list[set[int]])
    doubled: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Edges that are there for two reasons."""

    def add(self, node: Node) -> _Ends:
        """Adds the states and edges of a part."""
        match node:
            case Symbols(mask):
                if len(self.symbols) > MAX_STATES:
                    return _Ends([], [], empty=True)
                self.symbols.append(mask)
                self.follow.append(set())
                place = len(self.symbols) - 1
                return _Ends([place], [place], empty=False)
            case Chain(nodes):
                return self._chain(nodes)
            case Choice(nodes):
                ends = [self.add(inner) for inner in nodes]
                return _Ends(
                    [place for end in ends for place in end.first],
                    [place for end in ends for place in end.last],
                    empty=any(end.empty for end in ends),
                )
            case Loop(inner, optional):
                ends = self.add(inner)
                self._join(ends.last, ends.first)
                return _Ends(ends.first, ends.last, empty=ends.empty or optional)

    def _chain(self, nodes: tuple[Node, ...]) -> _Ends:
        whole = _Ends([], [], empty=True)
        for node in nodes:
            ends = self.add(node)
            self._join(whole.last, ends.first)
            first = whole.first + ends.first if whole.empty else whole.first
            last = whole.last + ends.last if ends.empty else ends.last
            whole = _Ends(first, last, empty=whole.empty and ends.empty)
        return whole

    def _join(self, last: list[int], first: list[int]) -> None:
        for place in last:
            self.doubled += [(place, after) for after in first if after in self.follow[place]]
            self.follow[place].update(first)

    def is_ambiguous(self) -> bool:
        """Whether two ways over the same text lead from a state back to it."""
        reach = self._reach()
        if any(reach[after] >> place & 1 for place, after in self.doubled):
            return True
        inner = [
            [after for after in self.follow[place] if reach[after] >> place & 1]
            for place in range(len(self.symbols))
        ]
        return self._two_ways(inner)

    def _reach(self) -> list[int]:
        """States that come after each state, as bits."""
        reach = [sum(1 << after for after in following) for following in self.follow]
        for middle in range(len(reach)):
            for place, found in enumerate(reach):
                if found >> middle & 1:
                    reach[place] = found | reach[middle]
        return reach

    def _two_ways(self, inner: list[list[int]]) -> bool:
        """Follows pairs of states that read the same text, from equal ones to equal ones.

        All equal pairs of a loop lead to each other, so any of them will do as the end.
        """
        waiting = [(place, place) for place, after in enumerate(inner) if after]
        found = set(waiting)
        before: dict[tuple[int, int], list[tuple[int, int]]] = {}
        steps = 0
        while waiting:
            pair = waiting.pop()
            steps += len(inner[pair[0]]) * len(inner[pair[1]])
            if steps > MAX_STEPS:
                return True
            for after in self._pairs_after(pair, inner):
                before.setdefault(after, []).append(pair)
                if after not in found:
                    found.add(after)
                    waiting.append(after)
        waiting = [pair for pair in found if pair[0] == pair[1]]
        seen = set(waiting)
        while waiting:
            for pair in before.get(waiting.pop(), ()):
                if pair[0] != pair[1]:
                    return True
                if pair not in seen:
                    seen.add(pair)
                    waiting.append(pair)
        return False

    def _pairs_after(self, pair: tuple[int, int], inner: list[list[int]]) -> set[tuple[int, int]]:
        return {
            (min(one, other), max(one, other))
            for one in inner[pair[0]]
            for other in inner[pair[1]]
            if self.symbols[one] & self.symbols[other]
        }
