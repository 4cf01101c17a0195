"""How messages are put before a chat template: as it wants them, as far as that was measured."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from treadle_core.tickets import Json
from treadle_gateway.conversation import Image, Message, Text, Tool, ToolCall
from treadle_gateway.markup.words import Guard


@dataclass(frozen=True, slots=True)
class Form:
    """What a template takes. Where it does not, `put` says the same in another way."""

    content: Literal["text", "parts"] = "text"
    """Content is a string, or always a list of parts."""
    images: bool = False
    """A part may be an image."""
    system_first: bool = True
    """A system message may lead. Else its text leads the first user message."""
    system_later: bool = True
    """A system message may stand further down. Else the user says it, as `<system>` text."""
    neighbours: bool = True
    """A role may speak twice in a row. Else both are one message."""
    tools: bool = True
    """Tool definitions are written. Else a system message tells them, in Hermes' words."""
    results: bool = True
    """There is a role for results of tools. Else the user says them, as `<tool_response>` text."""
    answers: bool = True
    """It also takes results of calls that an agent read out of words, and that have no ids."""
    blank: Literal["text", "none"] = "text"
    """Content of a message that only calls: an empty string, or none."""
    beside: bool = True
    """Words may stand beside calls. Else they are a message of their own before."""
    parallel: bool = True
    """A message may hold several calls. Else each is followed by its own result."""
    arguments: Literal["text", "mapping"] = "text"
    """Of a call: JSON text, or the mapping that it stands for."""
    short_ids: bool = False
    """Ids of calls are the last nine letters and digits of ours."""
    thoughts: Literal["field", "inline", "none"] = "none"
    """Reasoning is a field of its own, or stands before the content between its tags."""
    opens: str = "<think>"
    closes: str = "</think>"
    """What stands around reasoning."""
    switches: tuple[str, ...] = ()
    """Variables of the template that let a policy think, or not."""
    end: str = ""
    """Token that ends a turn which only speaks; empty where none is written."""
    call_end: str = ""
    """Token that ends a turn which calls."""


def put(messages: Sequence[Message], form: Form, guard: Guard) -> list[dict[str, Any]]:
    """The messages as a template reads them; their words are guarded.

    Raises ValueError when there are images and the template takes none.
    """
    names = {
        call.id: said_name(call.name, call.namespace) for each in messages for call in each.calls
    }
    return [_put(each, form, guard, names) for each in conformed(messages, form)]


def put_tools(tools: Sequence[Tool], guard: Guard) -> list[dict[str, Any]]:
    """Definitions as every template reads them, in OpenAI's form; their words are guarded."""
    return [_guarded(definition(tool), guard) for tool in tools]


def definition(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form."""
    return {
        "type": "function",
        "function": {
            "name": said_name(tool.name, tool.namespace),
            "description": tool.description,
            "parameters": dict(tool.parameters),
        },
    }


def said_name(name: str, namespace: str) -> str:
    """A tool's name as the policy says it."""
    return f"{namespace}.{name}" if namespace else name


def conformed(messages: Sequence[Message], form: Form) -> list[Message]:
    """The same conversation in messages that the template takes."""
    put = [_spoken(each, form) for each in messages]
    if not form.beside:
        put = [part for each in put for part in _apart(each)]
    if not form.parallel:
        put = _one_by_one(put)
    put = _systems(put, form)
    return put if form.neighbours else _merged(put)


def _spoken(message: Message, form: Form) -> Message:
    """Calls and results as words, where the template has no place for them."""
    if message.role == "assistant" and message.calls and not form.tools:
        said = "\n".join(_call_text(call) for call in message.calls)
        parts = (*message.parts, Text(f"\n{said}" if message.text else said))
        return replace(message, parts=parts, calls=())
    if message.role == "tool" and not (form.results if message.call_id else form.answers):
        return Message("user", _around("<tool_response>\n", message.parts, "\n</tool_response>"))
    return message


def _call_text(call: ToolCall) -> str:
    arguments = parsed(call.arguments)
    said: dict[str, Any] = {
        "name": said_name(call.name, call.namespace),
        "arguments": call.arguments if arguments is None else arguments,
    }
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"


def _around(before: str, parts: tuple[Text | Image, ...], behind: str) -> tuple[Text | Image, ...]:
    return (Text(before), *parts, Text(behind))


def _apart(message: Message) -> list[Message]:
    """Words and calls of a message as two messages."""
    if not message.parts or not message.calls:
        return [message]
    return [replace(message, calls=()), Message("assistant", calls=message.calls)]


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Several calls of a message as messages of one call, each before its result."""
    results = {each.call_id: each for each in messages if each.role == "tool"}
    put: list[Message] = []
    moved: set[str] = set()
    for each in messages:
        if each.role == "tool" and each.call_id in moved:
            continue
        if len(each.calls) < 2:
            put.append(each)
            continue
        for place, call in enumerate(each.calls):
            put.append(
                replace(each, calls=(call,)) if not place else Message("assistant", calls=(call,))
            )
            if call.id in results:
                put.append(results[call.id])
                moved.add(call.id)
    return put


def _systems(messages: Sequence[Message], form: Form) -> list[Message]:
    put: list[Message] = []
    led: tuple[Text | Image, ...] = ()
    for place, each in enumerate(messages):
        if each.role != "system" or (form.system_later if place else form.system_first):
            put.append(each)
        elif place:
            put.append(Message("user", _around("<system>\n", each.parts, "\n</system>")))
        else:
            led = each.parts
    if not led:
        return put
    if put and put[0].role == "user":
        return [replace(put[0], parts=(*led, Text("\n\n"), *put[0].parts)), *put[1:]]
    return [Message("user", led), *put]


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Neighbours of one role as one message; results of tools stay apart."""
    put: list[Message] = []
    for each in messages:
        last = put[-1] if put else None
        if last is None or last.role != each.role or each.role == "tool":
            put.append(each)
            continue
        between = (Text("\n\n"),) if last.parts and each.parts else ()
        put[-1] = replace(
            last,
            parts=(*last.parts, *between, *each.parts),
            reasoning=last.reasoning or each.reasoning,
            calls=(*last.calls, *each.calls),
        )
    return put


def _put(message: Message, form: Form, guard: Guard, names: Mapping[str, str]) -> dict[str, Any]:
    put: dict[str, Any] = {"role": message.role, "content": _content(message, form, guard)}
    if message.calls and form.blank == "none" and not put["content"]:
        put["content"] = None
    if message.reasoning and form.thoughts == "field":
        put["reasoning_content"] = guard.said(message.reasoning)
    if message.calls:
        put["tool_calls"] = [_put_call(call, form, guard) for call in message.calls]
    if message.role == "tool":
        put["tool_call_id"] = guard.said(_put_id(message.call_id, form))
        put["name"] = guard.said(names.get(message.call_id, ""))
    return put


def _content(message: Message, form: Form, guard: Guard) -> str | list[dict[str, str]]:
    parts = message.parts
    if message.reasoning and form.thoughts == "inline":
        parts = (Text(f"{form.opens}\n{message.reasoning}\n{form.closes}\n\n"), *parts)
    images = any(isinstance(part, Image) for part in parts)
    if images and not form.images:
        raise ValueError("the model reads no images")
    if not images and form.content == "text":
        return guard.said("".join(part.text for part in parts if isinstance(part, Text)))
    put: list[dict[str, str]] = []
    words = ""  # of neighbours, guarded at once: a token's text may be split over them
    for part in parts:
        if isinstance(part, Text):
            words += part.text
            continue
        if words:
            put.append({"type": "text", "text": guard.said(words)})
        put.append({"type": "image"})
        words = ""
    return [*put, {"type": "text", "text": guard.said(words)}] if words or not put else put


def _put_call(call: ToolCall, form: Form, guard: Guard) -> dict[str, Any]:
    arguments: Any = call.arguments or "{}"
    if form.arguments == "mapping":
        found = parsed(arguments)
        arguments = {"unparsed": arguments} if found is None else found
    function = {"name": said_name(call.name, call.namespace), "arguments": arguments}
    put: dict[str, Any] = {"id": _put_id(call.id, form), "type": "function", "function": function}
    return _guarded(put, guard)


def _put_id(name: str, form: Form) -> str:
    if not form.short_ids:
        return name
    return "".join(each for each in name if each.isascii() and each.isalnum())[-9:].rjust(9, "0")


def parsed(arguments: str) -> dict[str, Json] | None:
    """Arguments as the mapping that they stand for; None where they are none."""
    try:
        found: Any = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Json]", found) if isinstance(found, dict) else None


def _guarded(value: Any, guard: Guard) -> Any:
    """JSON with all its words guarded."""
    if isinstance(value, str):
        return guard.said(value)
    if isinstance(value, list):
        return [_guarded(each, guard) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {
            guard.said(str(name)): _guarded(each, guard)
            for name, each in cast("dict[Any, Any]", value).items()
        }
    return value
