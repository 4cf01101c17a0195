"""Small conversations, and what a template makes of them; pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle_agents.chat import Template
from treadle_gateway.conversation import Message, Text, Tool, ToolCall
from treadle_gateway.markup.form import Form, parsed
from treadle_gateway.markup.reader import Reader
from treadle_gateway.markup.readers.block import CallFormat
from treadle_gateway.markup.renderer import RefusedByTemplateError, Renderer
from treadle_gateway.markup.spelling import Spelling
from treadle_gateway.markup.words import Guard

TOOL = Tool(
    "forecast",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["place"],
    },
)
ARGUMENTS = '{"place": "Oslo", "days": 3}'
OTHER_ARGUMENTS = '{"place": "Rome", "days": 4}'


def said(role: Any, text: str, **more: Any) -> Message:
    return Message(role, (Text(text),) if text else (), **more)


def calling(*arguments: str, at: int = 0, **more: Any) -> Message:
    calls = (ToolCall(f"call0000{at}{n}", TOOL.name, each) for n, each in enumerate(arguments))
    return said("assistant", "", calls=tuple(calls), **more)


def result(text: str, *, at: int = 0, n: int = 0) -> Message:
    return said("tool", text, call_id=f"call0000{at}{n}")


SYSTEM = said("system", "Probe-system")
ASKS = said("user", "Probe-question")
SAYS = said("assistant", "Probe-answer")
ASKS_MORE = said("user", "Probe-more")
SAYS_MORE = said("assistant", "Probe-other")
THOUGHT = "Probe-thought"


@dataclass(frozen=True, slots=True)
class Bench:
    """A template, to be tried with messages in this form or that."""

    template: Template
    guard: Guard
    _known: dict[Any, str | None] = field(default_factory=dict[Any, "str | None"])

    def renderer(self, form: Form) -> Renderer:
        return Renderer(self.template, self.guard, form)

    def whole(self, form: Form, messages: Sequence[Message], **more: Any) -> str | None:
        """The text, or None where the template refuses; each conversation is rendered once."""
        key = (form, *messages, *((name, str(value)) for name, value in more.items()))
        if key not in self._known:
            try:
                self._known[key] = self.renderer(form).whole(messages, **more)
            except RefusedByTemplateError:
                self._known[key] = None
        return self._known[key]

    def shows(self, form: Form, messages: Sequence[Message], *said: str, **more: Any) -> bool:
        """All that was said is in the text."""
        text = self.whole(form, messages, **more)
        return text is not None and all(each in text for each in said)


def reads(
    spelling: Spelling,
    form: Form,
    calls: CallFormat | None,
    said: Sequence[int],
    meant: Message,
    *,
    thinks: bool = False,
) -> bool:
    """A reader finds in what was said what was meant."""
    reader = Reader(spelling, form, calls, tools=[TOOL], thinks=thinks, stop=(), new_id=lambda: "")
    reader.feed(said)
    _, found, _ = reader.finish(length=False)
    return (
        found.text.strip() == meant.text
        and found.reasoning == meant.reasoning
        and [(each.name, parsed(each.arguments)) for each in found.calls]
        == [(each.name, parsed(each.arguments)) for each in meant.calls]
    )
