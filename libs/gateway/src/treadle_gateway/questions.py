"""What a request means for the policy: the tokens behind those that stand, and who reads the reply.

Shape: P = tokens of a whole prompt.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import Shown
from treadle_gateway.capture.session import Place
from treadle_gateway.capture.turns import Turn
from treadle_gateway.conversation import Ask, Event, Finish, Message, Text
from treadle_gateway.errors import RefusedError
from treadle_gateway.markup.template import Markup
from treadle_gateway.wires.generate import TokenAsk

_LIGHT = 4096
"""Characters that are rendered and tokenised in about a millisecond."""


class Reading(Protocol):
    """Makes events of what the policy samples, token by token."""

    stopped: str
    """The stop text that came; empty so far."""
    reasoning_tokens: int

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """What more tokens say."""
        ...

    def finish(self, *, length: bool) -> tuple[list[Event], Message, Finish]:
        """What was held, the whole message, and why it ended."""
        ...


class Question(Protocol):
    """One request, in words or in tokens."""

    @property
    def ask(self) -> Ask:
        """What capture finds its place by."""
        ...

    def stand(self, place: Place) -> Place:
        """Where it goes on from after all."""
        ...

    def is_light(self, place: Place) -> bool:
        """Rendering takes so little that a thread would cost more."""
        ...

    def render(self, place: Place) -> Shown:
        """Its tokens behind those that stand. Raises RefusedError."""
        ...

    def grammar(self) -> str:
        """What the reply is to be, as in `Sampling.grammar`; empty where it may be any."""
        ...

    def reading(self) -> Reading:
        """Reads the reply."""
        ...

    def begun(self, turn: Turn) -> None:
        """Told of the turn that answers it."""
        ...


@dataclass(frozen=True, slots=True)
class Worded:
    """A request of messages."""

    markup: Markup
    ask: Ask
    call_prefix: str
    """What the id of a tool call begins with."""
    pictures: Mapping[str, Picture] = field(default_factory=dict[str, Picture])
    """Those of the session, by sha256."""

    def stand(self, place: Place) -> Place:
        """Fewer messages stand where the template says so."""
        if not place.before:
            return place
        stands = self.markup.stands(
            place.before, place.new, tools=bool(self.ask.tools), reasoning=self.ask.reasoning
        )
        return place if stands == len(place.before) else place.keep(stands)

    def is_light(self, place: Place) -> bool:
        if self.ask.tools and not place.before:
            return False  # they are rendered too
        said = (len(each.text) + len(each.reasoning) for each in place.new)
        called = (len(call.arguments) for each in place.new for call in each.calls)
        return sum(said) + sum(called) <= _LIGHT

    def render(self, place: Place) -> Shown:
        """Renders what is new."""
        ids = self.markup.render(
            place.before,
            place.new,
            tools=self.ask.tools,
            choice=self.ask.choice,
            reasoning=self.ask.reasoning,
            closed=place.closed,
        )
        return self.markup.shown(ids, place.new, self.pictures)

    def whole(self) -> Shown:
        """Tokens of the request as if nothing stood. Raises RefusedError."""
        ask = self.ask
        ids = self.markup.render(
            (), ask.messages, tools=ask.tools, choice=ask.choice, reasoning=ask.reasoning
        )
        return self.markup.shown(ids, ask.messages, self.pictures)

    def grammar(self) -> str:
        return self.markup.grammar(
            tools=self.ask.tools,
            choice=self.ask.choice,
            reasoning=self.ask.reasoning,
            goes_on=self._goes_on,
        )

    def reading(self) -> Reading:
        return self.markup.reader(
            tools=self.ask.tools,
            choice=self.ask.choice,
            reasoning=self.ask.reasoning,
            goes_on=self._goes_on,
            stop=self.ask.wanted.stop,
            new_id=lambda: f"{self.call_prefix}{secrets.token_hex(12)}",
        )

    def begun(self, turn: Turn) -> None:
        pass

    @property
    def _goes_on(self) -> bool:
        last = self.ask.messages[-1]
        return last.role == "assistant" and not last.calls


class _Unread:
    """Reads tokens as tokens."""

    def __init__(self) -> None:
        self.stopped = ""
        self.reasoning_tokens = 0
        self._ids: list[int] = []

    def feed(self, ids: Sequence[int]) -> list[Event]:
        self._ids += ids
        return []

    def finish(self, *, length: bool) -> tuple[list[Event], Message, Finish]:
        return [], Message("assistant", (Text(_words(self._ids)),)), "length" if length else "stop"


@dataclass(frozen=True, slots=True)
class _Line:
    """What was said in tokens up to and with one turn."""

    messages: tuple[Message, ...]
    turn: Turn


@dataclass(slots=True)
class TokenLines:
    """What was asked in tokens in one session: messages whose words are the ids.

    So what goes on, what asks again and what branches is found as it is for words.
    """

    _lines: list[_Line] = field(default_factory=list[_Line], init=False)

    def question(self, asked: TokenAsk, *, placeholder: int | None) -> "Tokens":
        """A request for tokens behind tokens; `placeholder` as of Tokens."""
        before = self._longest(asked.token_ids)
        messages = before.messages if before else ()
        tokens = before.turn.tokens if before else 0
        if tokens < asked.token_ids.size:
            rest = asked.token_ids[tokens:].tolist()
            messages = (*messages, Message("user", (Text(_words(rest)),)))
        ask = Ask(
            asked.model,
            messages,
            wanted=asked.wanted,
            max_tokens=asked.max_tokens,
            logprobs=asked.logprobs,
            identity=asked.identity,
            ignored=asked.ignored,
        )
        return Tokens(ask, asked.token_ids, self, placeholder)

    def add(self, messages: tuple[Message, ...], turn: Turn) -> None:
        """A turn that answers such a request."""
        self._lines.append(_Line(messages, turn))

    def _longest(self, ids: NDArray[np.int32]) -> _Line | None:
        """The longest line that `ids` goes on from, with its reply."""
        for line in sorted(self._lines, key=lambda line: -line.turn.tokens):
            said, sampled = line.turn.said, line.turn.sampled
            if said is None or sampled is None or line.turn.tokens > ids.size:
                continue
            whole = np.concatenate([line.turn.prompt_ids, sampled.token_ids])
            if np.array_equal(whole, ids[: whole.size]):
                return replace(line, messages=(*line.messages, said))
        return None


@dataclass(frozen=True, slots=True)
class Tokens:
    """A request of tokens."""

    ask: Ask
    token_ids: NDArray[np.int32]
    """Whole prompt, [P]."""
    lines: TokenLines
    placeholder: int | None
    """Token that stands for an image; None where the policy reads none."""

    def stand(self, place: Place) -> Place:
        return place

    def is_light(self, place: Place) -> bool:
        return True

    def render(self, place: Place) -> Shown:
        new = self.token_ids[place.tokens :]
        if self.placeholder is not None and self.placeholder in new:
            message = f"token_ids: {self.placeholder} stands for an image; show images in messages"
            raise RefusedError("invalid", message, field="token_ids", code="unsupported_image")
        return Shown(new)

    def grammar(self) -> str:
        return ""

    def reading(self) -> Reading:
        return _Unread()

    def begun(self, turn: Turn) -> None:
        self.lines.add(self.ask.messages, turn)


def check_tokens(asked: TokenAsk, vocabulary: int) -> None:
    """Raises RefusedError where a token is none of the policy's, which has so many."""
    largest = int(asked.token_ids.max())
    if largest >= vocabulary:
        message = f"token_ids: expected ids below {vocabulary}, got {largest}"
        raise RefusedError("invalid", message, field="token_ids", limit=vocabulary)


def _words(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))
