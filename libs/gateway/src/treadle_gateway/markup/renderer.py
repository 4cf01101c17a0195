"""A conversation as text: the whole of it, or what follows the turns that have their tokens."""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2 import TemplateError

from treadle_agents.chat import Template
from treadle_gateway.conversation import Message, Text, Tool
from treadle_gateway.markup.form import Form, put, put_tools
from treadle_gateway.markup.told import told
from treadle_gateway.markup.words import Guard

STUB = (Tool("stub", "", {"type": "object", "properties": {}}),)
"""Stands for tools whose definitions were rendered already."""

_TRIPS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class RefusedByTemplateError(Exception):
    """The template does not take these messages, or trips over them; the text says why."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What follows the tokens of the turns before."""

    end: str
    """Text of the token that the template ends a turn with; empty where it writes none."""
    text: str
    """What follows that, guarded."""


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renders messages with a template in the form that it takes."""

    template: Template
    guard: Guard
    form: Form
    _mark: str = field(default_factory=lambda: f"treadle{secrets.token_hex(8)}")
    """Stands for what is cut away; nobody says it by chance."""

    def whole(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        reasoning: bool = True,
        opens: bool = True,
    ) -> str:
        """A whole conversation, guarded; `opens`: up to where the policy speaks.

        Raises RefusedByTemplateError.
        """
        if tools and not self.form.tools:
            messages, tools = told(messages, tools), ()
        return self._render(messages, tools, reasoning=reasoning, opens=opens)

    def unfinished(
        self, messages: Sequence[Message], *, tools: Sequence[Tool] = (), reasoning: bool = True
    ) -> str:
        """A conversation up to the last word of its last message, an assistant's; guarded."""
        last = messages[-1]
        marked = replace(last, parts=(*last.parts, Text(self._mark)))
        whole = self.whole([*messages[:-1], marked], tools=tools, reasoning=reasoning, opens=False)
        return self._before_mark(whole)

    def delta(
        self,
        before: Sequence[Message],
        new: Sequence[Message],
        *,
        tools: bool = False,
        reasoning: bool = True,
    ) -> Delta | None:
        """What follows `before`, which ends with a turn of the policy, when `new` is said.

        Takes time proportional to `new`: of `before` only a stub is rendered. A last message of an
        assistant without calls is gone on with. None where the end of the turn cannot be found.
        Raises RefusedByTemplateError.
        """
        turn = before[-1]
        stub = [Message("user", (Text("?"),)), self._stub(turn)]
        if before[0].role == "system":
            stub = [Message("system", (Text("?"),)), *stub]
        defined = STUB if tools and self.form.tools else ()
        if new and new[-1].role == "assistant" and not new[-1].calls:
            mark = f"{self._mark}end"
            last = replace(new[-1], parts=(*new[-1].parts, Text(mark)))
            messages = [*stub, *new[:-1], last]
            rendered = self._render(messages, defined, reasoning=reasoning, opens=False)
            rendered = rendered.rpartition(mark)[0]
        else:
            rendered = self._render([*stub, *new], defined, reasoning=reasoning, opens=True)
        behind = rendered.rpartition(self._mark)[2]
        return self._cut(behind, called=bool(stub[-1].calls))

    def _cut(self, behind: str, *, called: bool) -> Delta | None:
        end = self.form.call_end if called else self.form.end
        if end:
            _, found, text = behind.partition(end)
            return Delta(end, text) if found else None
        return None if called else Delta("", behind)

    def _stub(self, turn: Message) -> Message:
        if not turn.calls or not self.form.tools:  # a call that is told is words
            return Message("assistant", (Text(self._mark),))
        calls = turn.calls if self.form.parallel else turn.calls[-1:]
        said = json.dumps({self._mark: self._mark})
        return Message("assistant", calls=tuple(replace(call, arguments=said) for call in calls))

    def _before_mark(self, rendered: str) -> str:
        text, found, _ = rendered.rpartition(self._mark)
        if not found:
            raise RefusedByTemplateError("a message of an assistant cannot be gone on with")
        return text

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, reasoning: bool, opens: bool
    ) -> str:
        switches: Mapping[str, Any] = dict.fromkeys(self.form.switches, reasoning)
        try:
            return self.template.render(
                put(messages, self.form, self.guard),
                opens=opens,
                tools=put_tools(tools, self.guard),
                **switches,
            )
        except _TRIPS as error:
            raise RefusedByTemplateError(str(error) or type(error).__name__) from error
