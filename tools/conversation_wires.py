"""Clients of the three wires: they write what they mean as JSON, and read what they are told."""

import json
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from treadle_core.tickets import Json
from treadle_gateway.conversation import Ask, Image, Message, Part, Text, ToolCall
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.messages import Messages
from treadle_gateway.wires.responses import Responses
from treadle_gateway.wires.wire import Wire

PICTURE = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)
"""A PNG of one pixel, in base64."""
PICTURE_SHA256 = sha256(b64decode(PICTURE)).hexdigest()


@dataclass(frozen=True)
class WireClient:
    """One wire, from the other side."""

    wire: Wire
    body: Callable[[Ask], dict[str, Json]]
    """A request, but for the fields that all wires have."""
    read: Callable[[Mapping[str, Any]], Message]
    """The reply that a response holds."""
    states_errors: bool
    """It can say of a result that it is an error."""
    stop: str
    """Name of the field with stop texts; empty where it has none."""
    reads_arguments: bool
    """Arguments are objects to it: what is none, it puts into one."""
    joins: bool
    """What an assistant says in two messages that touch is one to it."""

    def request(self, ask: Ask) -> bytes:
        """All that a client sends."""
        body = {"model": ask.model, "stream": ask.stream, **self.body(ask)}
        if ask.wanted.temperature is not None:
            body["temperature"] = ask.wanted.temperature
        if ask.wanted.stop:
            body[self.stop] = list(ask.wanted.stop)
        return json.dumps(body, ensure_ascii=ask.stream).encode()


def _chat_body(ask: Ask) -> dict[str, Json]:
    tools: list[Json] = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in ask.tools
    ]
    return {
        "messages": [_chat_message(message) for message in ask.messages],
        "tools": tools,
        "tool_choice": ask.choice.mode if tools else None,
        "reasoning_effort": None if ask.reasoning else "none",
        "max_completion_tokens": ask.max_tokens,
    }


def _chat_message(message: Message) -> Json:
    said: dict[str, Json] = {
        "role": message.role,
        "content": _content(message.parts, "text", _chat_picture),
    }
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.role == "tool":
        said["tool_call_id"] = message.call_id
    if message.calls:
        said["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return said


def _chat_picture() -> Json:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PICTURE}"}}


def _chat_read(response: Mapping[str, Any]) -> Message:
    said = response["choices"][0]["message"]
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in said.get("tool_calls", ())
    ]
    return _said(said["content"] or "", said.get("reasoning_content", ""), calls)


def _messages_body(ask: Ask) -> dict[str, Json]:
    messages = list(ask.messages)
    body: dict[str, Json] = {"max_tokens": ask.max_tokens or 128000}
    if messages[0].role == "system" and messages[0].text and len(messages) > 1:
        body["system"] = _content(messages.pop(0).parts, "text", _messages_picture)
    body["messages"] = [_messages_message(message) for message in messages]
    body["tools"] = [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": dict(tool.parameters),
        }
        for tool in ask.tools
    ]
    if ask.tools and ask.choice.mode == "required":
        body["tool_choice"] = {"type": "any"}
    body["thinking"] = {"type": "adaptive" if ask.reasoning else "disabled"}
    return body


def _messages_message(message: Message) -> Json:
    content = _content(message.parts, "text", _messages_picture)
    if message.role == "tool":
        result: dict[str, Json] = {
            "type": "tool_result",
            "tool_use_id": message.call_id,
            "content": content,
            "is_error": message.is_error,
        }
        return {"role": "user", "content": [result]}
    if message.role != "assistant":
        return {"role": message.role, "content": content}
    blocks: list[Json] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if isinstance(content, list):
        blocks += content
    else:
        blocks.append({"type": "text", "text": content})
    for call in message.calls:
        stated = object_of(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": stated})
    return {"role": "assistant", "content": blocks}


def _messages_picture() -> Json:
    source: Json = {"type": "base64", "media_type": "image/png", "data": PICTURE}
    return {"type": "image", "source": source}


def object_of(arguments: str) -> dict[str, Json]:
    """Arguments as the object that this wire wants."""
    try:
        value: Json = json.loads(arguments)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    return {"__unparsedToolInput": {"raw": arguments, "len": len(arguments)}}


def _messages_read(response: Mapping[str, Any]) -> Message:
    blocks = response["content"]
    calls = [
        ToolCall(block["id"], block["name"], json.dumps(block["input"]))
        for block in blocks
        if block["type"] == "tool_use"
    ]
    words = "".join(block["text"] for block in blocks if block["type"] == "text")
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    return _said(words, thought, calls)


def _responses_body(ask: Ask) -> dict[str, Json]:
    tools: list[Json] = [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description,
            "parameters": dict(tool.parameters),
        }
        for tool in ask.tools
    ]
    return {
        "input": [item for message in ask.messages for item in _items(message)],
        "tools": tools,
        "tool_choice": ask.choice.mode if tools else "auto",
        "reasoning": {"effort": None if ask.reasoning else "none"},
        "max_output_tokens": ask.max_tokens,
        "store": False,
    }


def _items(message: Message) -> list[Json]:
    if message.role == "tool":
        output = _content(message.parts, "input_text", _responses_picture)
        return [{"type": "function_call_output", "call_id": message.call_id, "output": output}]
    items: list[Json] = []
    if message.reasoning:
        summary: list[Json] = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "summary": summary})
    if message.parts or not message.calls:
        kind = "output_text" if message.role == "assistant" else "input_text"
        content = _content(message.parts, kind, _responses_picture)
        items.append({"type": "message", "role": message.role, "content": content})
    calls: list[Json] = [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        for call in message.calls
    ]
    return [*items, *calls]


def _responses_picture() -> Json:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{PICTURE}"}


def _responses_read(response: Mapping[str, Any]) -> Message:
    words, thought = "", ""
    calls: list[ToolCall] = []
    for item in response["output"]:
        if item["type"] == "reasoning":
            thought += "".join(part["text"] for part in item["summary"])
        elif item["type"] == "message":
            words += "".join(part["text"] for part in item["content"])
        else:
            calls.append(ToolCall(item["call_id"], item["name"], item["arguments"]))
    return _said(words, thought, calls)


def _content(parts: Sequence[Part], kind: str, picture: Callable[[], Json]) -> Json:
    """One text as a string, anything else as blocks."""
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    return [
        picture() if isinstance(part, Image) else {"type": kind, "text": part.text}
        for part in parts
    ]


def _said(words: str, thought: str, calls: Sequence[ToolCall]) -> Message:
    return Message("assistant", (Text(words),) if words else (), thought, tuple(calls))


WIRES = (
    WireClient(
        Chat(),
        _chat_body,
        _chat_read,
        stop="stop",
        states_errors=False,
        reads_arguments=False,
        joins=False,
    ),
    WireClient(
        Messages(),
        _messages_body,
        _messages_read,
        stop="stop_sequences",
        states_errors=True,
        reads_arguments=True,
        joins=False,
    ),
    WireClient(
        Responses(),
        _responses_body,
        _responses_read,
        stop="",
        states_errors=False,
        reads_arguments=False,
        joins=True,
    ),
)
