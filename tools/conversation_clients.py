"""A client at random: it edits, retries, branches, and gives back what it got in its own way."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import cast

from conversation_speech import ARGUMENTS, THOUGHTS, WORDS
from conversation_wires import PICTURE_SHA256

from treadle_core.tickets import Json
from treadle_gateway.conversation import (
    Ask,
    Image,
    Message,
    Part,
    Role,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    Wanted,
)

_LOOK: dict[str, Json] = {"type": "object", "properties": {"a": {"type": "string"}}}
_TOOLS = (
    (),
    (Tool("look", "Looks.", _LOOK),),
    (Tool("look", "Looks.", {"type": "object"}), Tool("run", "", _LOOK)),
)
FOREIGN = "foreign"
"""Id of calls that no policy made."""


@dataclass
class Client:
    """What one client remembers, and what it asks next."""

    random: Random
    pictures: bool
    """It shows some."""
    tools: tuple[Tool, ...] = field(init=False)
    histories: list[list[Message]] = field(default_factory=lambda: [[]])
    asks: list[Ask] = field(default_factory=list[Ask])

    def __post_init__(self) -> None:
        self.tools = self.random.choice(_TOOLS)

    def hear(self, messages: Sequence[Message]) -> None:
        """Remembers a conversation, its last reply included."""
        self.histories.append(list(messages))

    def ask(self) -> Ask:
        """Asks again, or goes on from something that it remembers."""
        if self.asks and self._chance(0.25):
            ask = self.random.choice(self.asks[-2:])
            if self._chance(0.2):
                ask = replace(ask, wanted=Wanted(temperature=0.5), stream=True)
        else:
            ask = self._extended(self.random.choice(self.histories[-2:] * 5 + self.histories))
        self.asks.append(ask)
        messages = tuple(self._as_returned(message) for message in ask.messages)
        return replace(ask, messages=messages, max_tokens=self.random.choice((None, 5)))

    def _extended(self, history: list[Message]) -> Ask:
        """Goes on from a history, which may be changed before."""
        history = self._changed(list(history))
        if history[-1].calls and self._chance(0.9):
            history += [self._result(call.id) for call in history[-1].calls]
        elif self._chance(0.9):
            history.append(self._message("user"))
        if self._chance(0.02):
            history.append(self._result("unheard"))
        tools = self.tools if self._chance(0.95) else self.random.choice(_TOOLS)
        required = bool(tools) and self._chance(0.05)
        return Ask(
            "policy",
            tuple(history),
            tools,
            ToolChoice("required") if required else ToolChoice(),
            Wanted(stop=("no",)) if self._chance(0.05) else Wanted(),
            reasoning=self._chance(0.98),
        )

    def _changed(self, history: list[Message]) -> list[Message]:
        """As it was, as a rule; or edited, cut back, begun anew, or with words of its own."""
        roll = self.random.random()
        if roll < 0.06 and history:
            place = self.random.randrange(len(history))
            edited = history[place]
            history[place] = replace(edited, parts=(*edited.parts, Text("!")))
        elif roll < 0.1:
            history = history[: self.random.randint(0, len(history))]
        elif roll < 0.13:
            history = [self._message("user")]
        elif roll < 0.18:
            history.append(self._message("assistant"))
        return history or [self._message("system")]

    def _message(self, role: Role) -> Message:
        parts: tuple[Part, ...] = (Text(self.random.choice(WORDS)),)
        if role != "assistant":
            picture = (
                (Image(PICTURE_SHA256, "image/png"),) if self.pictures and self._chance(0.1) else ()
            )
            return Message(role, parts + picture)
        call = ToolCall(FOREIGN, "look", self.random.choice(ARGUMENTS[:3]))
        calls = (call,) if self._chance(0.1) else ()
        return Message(role, parts, self.random.choice(THOUGHTS), calls)

    def _result(self, call_id: str) -> Message:
        said = self._message("user")
        return replace(said, role="tool", call_id=call_id, is_error=self._chance(0.1))

    def _as_returned(self, message: Message) -> Message:
        """As clients give back what they were given, without a change of meaning."""
        if self._chance(0.5):
            return message
        images = tuple(part for part in message.parts if isinstance(part, Image))
        if message.role != "assistant":
            return replace(message, parts=(*self._blocks(message.text), *images))
        text, reasoning = message.text, message.reasoning
        if self._chance(0.5):
            text = self.random.choice((text.strip(), f"{text} \n", f"\n{text}"))
            if message.calls and message.calls[0].id != FOREIGN and self._chance(0.2):
                text = ""
        if reasoning and self._chance(0.2):
            reasoning, text = "", f"<think>{reasoning}</think>{text}"
        elif self._chance(0.3):
            reasoning = ""
        calls = tuple(map(self._call_as_returned, message.calls))
        return replace(
            message, parts=(*self._blocks(text), *images), reasoning=reasoning, calls=calls
        )

    def _blocks(self, text: str) -> list[Text]:
        cut = self.random.randint(0, len(text))
        return [Text(part) for part in (text[:cut], text[cut:]) if part]

    def _call_as_returned(self, call: ToolCall) -> ToolCall:
        try:
            value: Json = json.loads(call.arguments)
        except ValueError:
            value = None
        if isinstance(value, dict):
            items = list(cast("dict[str, Json]", value).items())
            self.random.shuffle(items)
            call = replace(call, arguments=json.dumps(dict(items), indent=1))
        if call.id == FOREIGN or self._chance(0.8):
            return call
        raw = json.dumps({"__unparsedToolInput": {"raw": call.arguments}})
        return replace(call, name="invalid", arguments=raw)

    def _chance(self, share: float) -> bool:
        return self.random.random() < share
