"""What kind of conversation a request belongs to: by its client's own marks, else by its shape.

`main`; `subagent`: another system prompt, with tools; `side`: another one, without (titles,
summaries); `compaction`: a history that was rewritten; `branch`: a second way on from one reply, or
a second start; or the kind that the client names, `title` for one.
"""

from dataclasses import dataclass, field
from itertools import takewhile

from treadle_gateway.capture.keys import words_of
from treadle_gateway.conversation import Ask

LABELS = ("main", "subagent", "compaction", "branch", "title", "side")
"""Those that a recipe may choose among; a kind that only its client knows counts as `side`."""

_ORDINARY = frozenset({"", "main", "turn"})
"""Kinds that say nothing: a client's own name for an ordinary request."""


@dataclass(frozen=True, slots=True)
class Opening:
    """How a conversation begins."""

    system: tuple[int, bytes]
    first_user: bytes
    head: bytes
    tools: bool


@dataclass(slots=True, eq=False)
class Path:
    """A line of turns of one kind; what goes on from them belongs to it."""

    label: str
    opening: Opening | None = None
    """None where it goes on from a turn of another path."""
    chosen: frozenset[str] = frozenset(LABELS)
    """Labels whose turns are trained."""
    turns: int = 0

    @property
    def trained(self) -> bool:
        """Its turns are, as far as its label goes, which may still change."""
        return (self.label if self.label in LABELS else "side") in self.chosen


@dataclass(slots=True)
class Paths:
    """The paths of a session on which a turn began, in the order of their beginning."""

    chosen: frozenset[str] = frozenset(LABELS)
    """Labels whose turns are trained."""
    begun: list[Path] = field(default_factory=list[Path], init=False)

    def begin(self, path: Path) -> None:
        """A turn begins on `path`."""
        path.turns += 1
        if path.turns == 1:
            self.begun.append(path)

    def onward(self, ask: Ask, path: Path, *, taken: bool) -> Path:
        """The path of a request that goes on from `path`; `taken`: something else does already."""
        label = _named(ask)
        if label:
            return path if path.label == label else self._new(label)
        return self._new("branch") if taken else path

    def again(self, ask: Ask, path: Path) -> Path:
        """The path of a request that asks again what was asked on `path`."""
        label = _named(ask)
        return path if label in ("", path.label) else self._new(label)

    def opened(self, ask: Ask, head: bytes) -> Path:
        """The path of a request that goes on from nothing."""
        opening = Opening(_system(ask), _first_user(ask), head, bool(ask.tools))
        return self._new(_named(ask) or self._shape(opening), opening)

    def _new(self, label: str, opening: Opening | None = None) -> Path:
        return Path(label, opening, self.chosen)

    def _shape(self, new: Opening) -> str:
        main = next((path for path in self.begun if path.label == "main"), None)
        if main is None or main.opening is None:
            return "main"
        alike = [path for path in self.begun if path.opening and path.opening.system == new.system]
        if alike:
            return _rewritten(alike)
        if new.tools and not main.opening.tools and main.turns == 1:
            main.label = "side"  # a title was asked for first
            return "main"
        if new.head == main.opening.head and new.first_user == main.opening.first_user:
            return _rewritten([main])
        return "subagent" if new.tools else "side"


def _rewritten(alike: list[Path]) -> str:
    """A conversation begins as others did: it was rewritten if there was something to rewrite."""
    return "compaction" if any(path.turns > 1 for path in alike) else "branch"


def _named(ask: Ask) -> str:
    """The label by the client's own marks; empty where it has none."""
    kind = ask.identity.get("kind", "")
    if kind not in _ORDINARY:
        return kind
    return "subagent" if ask.identity.get("agent") or ask.identity.get("parent") else ""


def _system(ask: Ask) -> tuple[int, bytes]:
    """What tells system prompts apart: length and second half.

    A client may write a few letters near the start that follow from what the user says.
    """
    leading = takewhile(lambda message: message.role == "system", ask.messages)
    text = "".join(message.text for message in leading)
    return len(text), words_of(text[len(text) // 2 :])


def _first_user(ask: Ask) -> bytes:
    return words_of(next((message.text for message in ask.messages if message.role == "user"), ""))
