"""The turns of a session as segments: every token that was seen, and each action trained once.

Shapes: T = tokens of one segment.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.episodes import NO_VERSION, Segment
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan
from treadle_gateway.capture.turns import Turn, moved

OTHER_TEMPERATURE = "other_temperature"
"""Why a turn is not trained: no segment that shows it has its temperature."""


class Leaves:
    """The lines of turns that end a session, and where each turn is trained."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        """`turns` in the order of their beginning, so that each comes behind its base."""
        self._sampled = {turn: _sampled(turn) for turn in turns}
        alive: set[Turn] = set()
        inner: set[Turn] = set()
        for turn in reversed(turns):
            # A turn of which nothing was heard is seen only by those that go on from it.
            if self._sampled[turn] or turn in inner:
                alive.add(turn)
                if turn.base:
                    inner.add(turn.base)
        self.lines = [_line(turn) for turn in turns if turn in alive and turn not in inner]
        self.home = self._homes()

    def segments(self, *, trainable: bool) -> tuple[Segment, ...]:
        """One for each line, in the order in which their last turns began."""
        return tuple(self._segment(line, trainable=trainable) for line in self.lines)

    def _homes(self) -> dict[Turn, Turn]:
        """For each trained turn the last turn of the line that it is trained in.

        That is the first line that ends with a trained turn; where none does, the first.
        """
        home: dict[Turn, Turn] = {}
        for line in sorted(self.lines, key=lambda line: bool(line[-1].untrained)):
            temperature = _temperature(line)
            for turn in line:
                if not turn.untrained and turn.sampling.temperature == temperature:
                    home.setdefault(turn, line[-1])
        return home

    def _segment(self, line: list[Turn], *, trainable: bool) -> Segment:
        here = [trainable and self.home.get(turn) is line[-1] for turn in line]
        return Segment(
            token_ids=self._spread(line, lambda turn: turn.new_ids, lambda own: own.token_ids),
            sampled=self._spread(line, _full(0, np.bool_), _ones),
            trained=np.concatenate(
                [
                    np.repeat([False, trained], [turn.new_ids.size, self._size(turn)])
                    for turn, trained in zip(line, here, strict=True)
                ]
            ),
            logprobs=self._spread(line, _full(0, np.float32), lambda own: own.logprobs),
            policy_version=self._spread(
                line, _full(NO_VERSION, np.int32), lambda own: own.policy_version
            ),
            context_version=self._spread(
                line, _full(NO_VERSION, np.int32), lambda own: own.context_version
            ),
            temperature=_temperature(line),
            media=self._media(line),
        )

    def _media(self, line: list[Turn]) -> tuple[MediumSpan, ...]:
        """Where images are in the segment of a line."""
        spans: list[MediumSpan] = []
        size = 0
        for turn in line:
            spans += moved(turn.media, size)
            size += turn.new_ids.size + self._size(turn)
        return tuple(spans)

    def _size(self, turn: Turn) -> int:
        own = self._sampled[turn]
        return own.token_ids.size if own else 0

    def _spread(
        self,
        line: list[Turn],
        context: Callable[[Turn], NDArray[Any]],
        values: Callable[[Generated], NDArray[Any]],
    ) -> NDArray[Any]:
        """Values of a line's tokens, [T]: of those that were shown, and of those sampled."""
        parts: list[NDArray[Any]] = []
        for turn in line:
            parts.append(context(turn))
            own = self._sampled[turn]
            if own:
                parts.append(values(own))
        return np.concatenate(parts)


def _sampled(turn: Turn) -> Generated | None:
    """What was heard of a turn. One that still runs may have heard what no segment may hold."""
    try:
        return turn.sampled
    except InvalidFieldError:
        return None


def _line(turn: Turn) -> list[Turn]:
    """The turns whose tokens lead to those of `turn`, oldest first, and itself."""
    line = [turn]
    while line[-1].base:
        line.append(line[-1].base)
    return line[::-1]


def _temperature(line: list[Turn]) -> float:
    """The one of a segment: that of its last trained turn; where there is none, of its last."""
    trained = [turn for turn in line if not turn.untrained]
    return (trained or line)[-1].sampling.temperature


def _full(fill: float, dtype: type[Any]) -> Callable[[Turn], NDArray[Any]]:
    return lambda turn: np.full(turn.new_ids.size, fill, dtype)


def _ones(own: Generated) -> NDArray[np.bool_]:
    return np.ones(own.token_ids.size, np.bool_)
