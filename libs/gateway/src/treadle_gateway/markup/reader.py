"""What a policy samples, token by token, as events."""

import string
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Protocol

from treadle_gateway.conversation import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    Event,
    Finish,
    Message,
    ReasoningDelta,
    Text,
    TextDelta,
    Tool,
    ToolCall,
)
from treadle_gateway.markup.form import Form, said_name
from treadle_gateway.markup.pieces import Fence, Stops, split
from treadle_gateway.markup.readers.block import Argued, Block, CallFormat, Named, Step


class Characters(Protocol):
    """The text of tokens that come one by one."""

    def push(self, *tokens: int) -> str:
        """What more tokens add: whole characters."""
        ...

    def flush(self) -> str:
        """What is held; what comes next begins anew."""
        ...


class Vocabulary(Protocol):
    """What a reader needs to know of a tokenizer."""

    @property
    def added(self) -> Mapping[int, str]:
        """Tokens that are not made of others, by id."""
        ...

    @property
    def markers(self) -> frozenset[str]:
        """Texts of the added tokens."""
        ...

    @property
    def hidden(self) -> frozenset[str]:
        """Those of the texts that are markup alone."""
        ...

    def characters(self) -> Characters:
        """A way to tell tokens that come one by one."""
        ...


_SPACE = string.whitespace


class _Mode(Enum):
    START = auto()
    """Nothing but space was said."""
    THINK = auto()
    SAY = auto()
    CALL = auto()


class Reader:
    """Reads one reply: never tells half a character, a stop text or markup.

    A marker that is a token of the model is that token alone, not text that looks like it. What
    stands in an open code fence is text. A block that names no call is told as the text it is.
    """

    stopped: str
    """The stop text that came; empty so far."""
    reasoning_tokens: int
    """Tokens that were reasoning, with the markers around it and the space before."""

    def __init__(
        self,
        words: Vocabulary,
        form: Form,
        calls: CallFormat | None,
        *,
        tools: Sequence[Tool],
        thinks: bool,
        stop: Sequence[str],
        new_id: Callable[[], str],
    ) -> None:
        """`thinks`: the prompt ended within a block of reasoning; `calls`: None reads none."""
        self.stopped = ""
        self.reasoning_tokens = 0
        self._words = words
        self._characters = words.characters()
        self._stops = Stops(stop)
        self._form = form
        self._calls = calls if tools else None
        self._tools = _by_name(tools)
        self._new_id = new_id
        self._mode = _Mode.THINK if thinks else _Mode.START
        self._undecided = 0  # tokens while it was not clear how the reply begins
        self._pending = ""  # may be the beginning of a marker
        self._space = ""  # told once something follows
        self._lead = "\n" if thinks else ""  # what a marker leaves to be dropped behind it
        self._fence = Fence()
        self._block: Block | None = None
        self._opened = ""  # the marker before the block; empty where it has none
        self._raw = ""  # of the block, while it has named no call
        self._named = False
        self._events: list[Event] = []
        self._told: list[Event] = []

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """What more tokens say."""
        at = 0
        while at < len(ids) and not self.stopped:
            before = self._mode
            words = self._words_from(ids, at)
            if len(words) > 1:
                self._text(self._characters.push(*words))
            else:
                self._push(ids[at])
            at += len(words) or 1
            self._undecided += before is _Mode.START
            if _Mode.THINK in (before, self._mode):
                self.reasoning_tokens += self._undecided or 1
                self._undecided = 0
        return self._take()

    def finish(self, *, length: bool) -> tuple[list[Event], Message, Finish]:
        """What was held, the whole message, and why it ended."""
        if not self.stopped:
            self._text(self._characters.flush())
            self._pending += self._stops.flush()
        self._advance(last=True)
        self._end_block()
        if self._mode is _Mode.SAY or self._mode is _Mode.START:
            self._tell_space()
        events = self._take()
        message = _message(self._told)
        finish: Finish = "length" if length else "calls" if message.calls else "stop"
        return events, message, finish

    def _words_from(self, ids: Sequence[int], at: int) -> Sequence[int]:
        """Tokens that can be read as one text: none are counted one by one, and none is added."""
        if self._mode is _Mode.START or self._mode is _Mode.THINK:
            return ids[at : at + 1]
        added = self._words.added
        end = next((place for place in range(at, len(ids)) if ids[place] in added), len(ids))
        return ids[at:end]

    def _push(self, token: int) -> None:
        added = self._words.added.get(token)
        if added is None:
            self._text(self._characters.push(token))
            return
        self._text(self._characters.flush())
        if self.stopped:
            return
        self._pending += self._stops.flush()
        if self._mode is not _Mode.START or self._pending.strip():
            self._advance(last=True)
        if stop := self._stops.within(added):
            self.stopped = stop
        elif added in self._markers():
            self._pending = ""  # space before the first marker
            self._marker(added)
        elif added not in self._words.hidden or (
            self._block is not None and self._calls and added in self._calls.inner
        ):
            said, self._pending = self._pending + added, ""
            self._consume(said)

    def _text(self, text: str) -> None:
        if not text:
            return
        said, self.stopped = self._stops.push(text)
        self._pending += said
        self._advance(last=False)

    def _markers(self) -> tuple[str, ...]:
        """The markers that mean something now."""
        calls = self._calls
        match self._mode:
            case _Mode.START:
                return (self._form.opens, *([calls.opens] if calls else []))
            case _Mode.THINK:
                return (self._form.closes,)
            case _Mode.SAY:
                return (calls.opens,) if calls else ()
            case _Mode.CALL:
                return (calls.closes or calls.opens,) if calls else ()

    def _advance(self, *, last: bool) -> None:
        """Reads what is pending, up to what may be a marker's beginning."""
        while self._pending:
            if self._mode is _Mode.START and not self._begin(last=last):
                return
            markers = [each for each in self._markers() if each not in self._words.markers]
            before, marker, self._pending = split(self._pending, markers, last=last)
            if before:
                self._consume(before)
            if not marker:
                return
            self._marker(marker)

    def _begin(self, *, last: bool) -> bool:
        """Leaves START once it is clear how the reply begins; False while it is not."""
        said = self._pending.lstrip()
        if not said and not last:
            return False
        markers = [each for each in self._markers() if each not in self._words.markers]
        if not last and any(each.startswith(said) for each in markers):
            return False
        if any(said.startswith(each) for each in markers):
            return True  # found as a marker
        self._mode = _Mode.SAY
        if said.startswith("{") and self._calls and self._calls.bare:
            self._open("")
        return True

    def _marker(self, marker: str) -> None:
        if marker == self._form.opens and self._mode is _Mode.START:
            self._mode, self._lead, self._space = _Mode.THINK, "\n", ""
        elif self._mode is _Mode.THINK:
            self._mode, self._lead, self._space = _Mode.SAY, "\n", ""
        elif self._mode is _Mode.CALL:
            self._end_block(marker)
            if self._calls and marker == self._calls.opens:
                self._open(marker)
        elif self._fence.open:
            self._consume(self._shown(marker))
        else:
            self._open(marker)

    def _open(self, marker: str) -> None:
        if self._calls is None:
            return
        self._mode, self._opened, self._raw, self._named = _Mode.CALL, marker, "", False
        self._block = self._calls.block(self._tools, bare=not marker)

    def _end_block(self, marker: str = "") -> None:
        if self._block is None:
            return
        self._steps(self._block.end())
        self._block, self._mode = None, _Mode.SAY
        if self._named:
            self._lead, self._space = _SPACE, ""
        else:
            self._consume(self._shown(self._opened) + self._raw + self._shown(marker))

    def _shown(self, marker: str) -> str:
        return "" if marker in self._words.hidden else marker

    def _consume(self, text: str) -> None:
        if self._block is not None:
            if not self._named:
                self._raw += text
            self._steps(self._block.feed(text))
            return
        if self._mode is _Mode.START:
            self._mode = _Mode.SAY
        if self._mode is _Mode.SAY:
            self._fence.feed(text)
        text = text.lstrip(self._lead) if self._lead else text
        if not text:
            return
        self._lead = ""
        kept = text.rstrip()
        if kept:
            self._tell_space()
            self._tell(kept)
        self._space += text[len(kept) :]

    def _tell_space(self) -> None:
        if self._space:
            self._tell(self._space)
            self._space = ""

    def _tell(self, text: str) -> None:
        said = ReasoningDelta if self._mode is _Mode.THINK else TextDelta
        self._events.append(said(text))

    def _steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            if isinstance(step, Named):
                if not self._named:
                    self._space = ""  # between what it says and what it calls
                self._named, self._raw = True, ""
                self._events.append(self._started(step))
            elif isinstance(step, Argued):
                self._events.append(ArgumentsDelta(step.text))
            else:
                self._events.append(CallEnded())

    def _started(self, step: Named) -> CallStarted:
        tool = self._tools.get(step.name)
        name, namespace = (tool.name, tool.namespace) if tool else (step.name, "")
        return CallStarted(self._new_id() + step.id, name, namespace)

    def _take(self) -> list[Event]:
        """The events since the last, neighbours of one kind as one."""
        taken: list[Event] = []
        for event in self._events:
            joined = _joined(taken[-1], event) if taken else None
            if joined is None:
                taken.append(event)
            else:
                taken[-1] = joined
        self._events = []
        self._told += taken
        return taken


def _joined(one: Event, two: Event) -> Event | None:
    """Two events as one; None where they are two."""
    match one, two:
        case TextDelta(text), TextDelta(more):
            return TextDelta(text + more)
        case ReasoningDelta(text), ReasoningDelta(more):
            return ReasoningDelta(text + more)
        case ArgumentsDelta(text), ArgumentsDelta(more):
            return ArgumentsDelta(text + more)
        case _:
            return None


def _by_name(tools: Sequence[Tool]) -> Mapping[str, Tool]:
    """Tools by the names that a policy may say: the bare one too, where it is one tool's alone."""
    bare: dict[str, list[Tool]] = {}
    for tool in tools:
        bare.setdefault(tool.name, []).append(tool)
    found = {name: named[0] for name, named in bare.items() if len(named) == 1}
    return found | {said_name(tool.name, tool.namespace): tool for tool in tools}


def _message(events: Sequence[Event]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[CallStarted, list[str]]] = []
    for event in events:
        match event:
            case TextDelta(text):
                texts.append(text)
            case ReasoningDelta(text):
                thoughts.append(text)
            case CallStarted():
                calls.append((event, []))
            case ArgumentsDelta(text):
                calls[-1][1].append(text)
            case CallEnded():
                pass
    return Message(
        "assistant",
        parts=(Text("".join(texts)),) if texts else (),
        reasoning="".join(thoughts),
        calls=tuple(
            ToolCall(call.id, call.name, "".join(said), call.namespace) for call, said in calls
        ),
    )
