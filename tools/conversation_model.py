"""What capture has to do, said as simply as possible: a list of turns, each with all it saw.

Nothing here is quick: every request is compared with every turn, message by message.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle_gateway.conversation import Ask, Message, Text

Row = tuple[int, bool, bool, float, int]
"""Of one token: id, sampled, trained, log-probability, version."""


@dataclass
class Turn:
    """One request and its reply, with whole lists."""

    number: int
    ask: Ask
    messages: list[Message]
    base: "Turn | None"
    prompt: list[Row]
    temperature: float
    cause: str
    state: str = "running"
    said: tuple[Message, ...] = ()
    """Its reply; none while that is unknown."""
    closed: bool = False
    open: bool = False
    sampled: list[Row] = field(default_factory=list[Row])

    @property
    def trained(self) -> bool:
        """It is an action, sampled as the recipe says."""
        counts = self.state == "delivered" and not self.cause
        return counts and self.temperature > 0 and bool(self.sampled)


@dataclass
class Found:
    """Where a request belongs."""

    kind: str
    turn: Turn | None
    base: Turn | None
    messages: list[Message]
    """As they are known: the policy's in its own words, the others as they were first told."""
    shown: list[Message]
    """The others as they are told now."""

    def keep(self, count: int) -> None:
        """Lets the tokens of at most `count` messages stand."""
        while self.base and len(self.base.messages) + 1 > count:
            self.base = self.base.base


class Model:
    """All turns of one session."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.issued: set[str] = set()

    def locate(self, ask: Ask) -> Found | None:
        """Where a request belongs; None where it is refused."""
        told = list(ask.messages)
        named = {""} | self.issued | {call.id for message in told for call in message.calls}
        if not told or any(
            message.role == "tool" and message.call_id not in named for message in told
        ):
            return None
        again = [
            turn
            for turn in self.turns
            if _asked(turn.ask) == _asked(ask) and self._all_mean(turn.messages, told)
        ]
        onward = [turn for turn in self.turns if turn.said and self._leads(turn, told)]
        same = [turn for turn in onward if _head(turn.ask) == _head(ask)]
        base = _longest(same)
        for turn in (base, _longest(onward)):
            if turn and turn.state == "finished":
                turn.state = "delivered"
        messages = self._resolved(told, base)
        shown = [
            self._shown(messages[:place], *pair)
            for place, pair in enumerate(zip(messages, told, strict=True))
        ]
        unseen = [turn for turn in again if turn.state in ("running", "finished")]
        if not unseen:
            return Found("sample", None, base, messages, shown)
        kind = "join" if unseen[-1].state == "running" else "replay"
        return Found(kind, unseen[-1], base, messages, shown)

    def begin(
        self, ask: Ask, found: Found, new: Sequence[int], *, temperature: float, cause: str
    ) -> Turn:
        """Begins a turn behind the tokens of its base."""
        before = found.base.prompt + found.base.sampled if found.base else []
        prompt = before + [(token, False, False, 0.0, -1) for token in new]
        turn = Turn(len(self.turns), ask, found.messages, found.base, prompt, temperature, cause)
        self.turns.append(turn)
        return turn

    def say(self, turn: Turn, message: Message) -> None:
        """Its reply is known."""
        turn.said = (message,)
        self.issued |= {call.id for call in message.calls}

    def segments(self) -> list[tuple[float, list[Row]]]:
        """Temperature and rows of every line, in the order of creation."""
        lines = [self._line(turn) for turn in self.turns if self._is_leaf(turn)]
        home: dict[int, Turn] = {}
        for ends_trained in (True, False):
            for line in lines:
                if line[-1].trained == ends_trained:
                    for turn in line:
                        if turn.trained and turn.temperature == _temperature(line):
                            home.setdefault(turn.number, line[-1])
        return [(_temperature(line), self._rows(line, home)) for line in lines]

    def _rows(self, line: list[Turn], home: dict[int, Turn]) -> list[Row]:
        rows = list(line[0].prompt)
        for turn, after in zip(line, [*line[1:], None], strict=True):
            trained = home.get(turn.number) is line[-1]
            rows += [(row[0], True, trained, row[3], row[4]) for row in turn.sampled]
            if after:
                rows += after.prompt[len(turn.prompt) + len(turn.sampled) :]
        return rows

    def _is_leaf(self, turn: Turn) -> bool:
        """Something was sampled, and nothing behind it."""
        behind = [other for other in self.turns if other is not turn and turn in self._line(other)]
        return bool(turn.sampled) and not any(other.sampled for other in behind)

    def _line(self, turn: Turn) -> list[Turn]:
        return [*(self._line(turn.base) if turn.base else []), turn]

    def _leads(self, turn: Turn, told: list[Message]) -> bool:
        """Whether a request goes on from what a turn said."""
        known = [*turn.messages, *turn.said]
        if len(known) == len(told) and not turn.open:
            return False
        return self._all_mean(known, told[: len(known)])

    def _resolved(self, told: list[Message], base: Turn | None) -> list[Message]:
        """The request as it is known: behind its base, the policy's messages where they fit."""
        messages = [*base.messages, *base.said] if base else []
        for message in told[len(messages) :]:
            said = [
                turn for turn in self._said_behind(messages) if self._means(*turn.said, message)
            ]
            newest = _longest(said)
            messages += newest.said if newest else (message,)
        return messages

    def _shown(self, before: list[Message], known: Message, told: Message) -> Message:
        """A message as it is to be rendered: the policy's own words where it said the same."""
        same = [turn for turn in self._said_behind(before) if self.same_meaning(turn.said, [known])]
        newest = _longest(same)
        return newest.said[0] if newest else told

    def _said_behind(self, messages: list[Message]) -> list[Turn]:
        """Turns that said something behind just these messages."""
        return [
            turn for turn in self.turns if turn.said and self.same_meaning(turn.messages, messages)
        ]

    def same_meaning(self, mine: Sequence[Message], its: Sequence[Message]) -> bool:
        """Whether two conversations say the same."""
        return self._all_mean(mine, its) and self._all_mean(its, mine)

    def _all_mean(self, known: Sequence[Message], told: Sequence[Message]) -> bool:
        return len(known) == len(told) and all(map(self._means, known, told))

    def _means(self, known: Message, told: Message) -> bool:
        """Whether a client tells a known message."""
        if known.role != told.role:
            return False
        if known.role != "assistant":
            mine, its = ((_words(m), m.call_id, m.is_error) for m in (known, told))
            return mine == its
        (thought, said), (told_thought, told_said) = _spoken(known), _spoken(told)
        if told_thought not in ("", thought):
            return False
        ids = [call.id for call in told.calls]
        if self.issued.intersection(ids):
            return told_said in ("", said) and ids == [call.id for call in known.calls]
        calls = [[(c.id, c.name, _value(c.arguments)) for c in m.calls] for m in (known, told)]
        return said == told_said and calls[0] == calls[1]


def _longest(turns: Sequence[Turn]) -> Turn | None:
    """The longest conversation; of equal ones the newest that was delivered."""

    def rank(turn: Turn) -> tuple[int, bool, int]:
        return len(turn.messages), turn.state == "delivered", turn.number

    return max(turns, key=rank, default=None)


def _temperature(line: list[Turn]) -> float:
    return ([turn for turn in line if turn.trained] or line)[-1].temperature


def _head(ask: Ask) -> Any:
    return ask.tools, ask.reasoning


def _asked(ask: Ask) -> Any:
    return ask.tools, ask.reasoning, ask.choice, ask.wanted


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments.strip()


def _words(message: Message) -> str:
    """Words and pictures."""
    return "".join(p.text if isinstance(p, Text) else f"[{p.sha256}]" for p in message.parts)


def _spoken(message: Message) -> tuple[str, str]:
    """What an assistant thought and said."""
    said = _words(message).strip()
    if not message.reasoning and said.startswith("<think>") and "</think>" in said:
        thought, _, said = said.removeprefix("<think>").partition("</think>")
        return thought.strip(), said.strip()
    return message.reasoning.strip(), said
