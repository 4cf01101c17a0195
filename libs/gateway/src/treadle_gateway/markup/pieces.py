"""Text that comes in pieces: stop texts, markers and code fences in it."""

from collections.abc import Sequence


class Stops:
    """Finds stop texts, wherever the pieces fall; what may become one is held."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """What is certainly no stop text, and the stop text that came, or empty."""
        if not self._stops:
            return text, ""
        said, stop, self._held = split(self._held + text, self._stops, last=False)
        return said, stop

    def flush(self) -> str:
        """What was held: nothing follows that would make it a stop text."""
        held, self._held = self._held, ""
        return held

    def within(self, token: str) -> str:
        """The stop text that a token of the model spells; empty where it spells none."""
        return next((stop for stop in self._stops if stop in token), "")


class Fence:
    """Whether a code fence is open, line by line."""

    open: bool

    def __init__(self) -> None:
        self.open = False
        self._line = ""  # its beginning, as far as it may tell of a fence

    def feed(self, text: str) -> None:
        for place, piece in enumerate(text.split("\n")):
            if place:
                self._line = ""
            known = len(self._line)
            if known < 3:
                self._line = (self._line + piece).lstrip()[:3]
                if len(self._line) == 3 and self._line == "```":
                    self.open = not self.open


def split(text: str, markers: Sequence[str], *, last: bool) -> tuple[str, str, str]:
    """What is before the first marker, the marker, and the rest.

    Without a marker the rest is the longest end that may begin one: nothing if `last`.
    """
    found = [(at, -len(each), each) for each in markers if (at := text.find(each)) >= 0]
    if found:
        at, _, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    if last or not markers:
        return text, "", ""
    longest = max(map(len, markers)) - 1
    for held in range(min(longest, len(text)), 0, -1):
        if any(each.startswith(text[-held:]) for each in markers):
            return text[:-held], "", text[-held:]
    return text, "", ""
