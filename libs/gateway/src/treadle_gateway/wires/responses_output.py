"""Output of the Responses API: the objects that a reply and a stream are made of."""

import json
from collections.abc import Sequence
from typing import Any, cast

from treadle_core.tickets import Json
from treadle_gateway.conversation import Ask, Reply, ToolCall, Usage

CUSTOM_PARAMETERS: dict[str, Json] = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Of a custom tool, which takes a text and no object: that is what the policy is told."""


def custom_tools(ask: Ask) -> frozenset[str]:
    """Names of the custom tools."""
    return frozenset(tool.name for tool in ask.tools if tool.parameters is CUSTOM_PARAMETERS)


def item_id(prefix: str, reply_id: str, place: int) -> str:
    """Id of one item of a reply."""
    return f"{prefix}_{reply_id}{place:04x}"


def reasoning_item(reply_id: str, place: int, text: str) -> dict[str, Json]:
    """A thought. Clients that keep no state echo a thought only with something encrypted."""
    summary: list[Json] = [summary_part(text)] if text else []
    return {
        "id": item_id("rs", reply_id, place),
        "type": "reasoning",
        "summary": summary,
        "encrypted_content": f"{reply_id}{place:04x}",
    }


def summary_part(text: str) -> dict[str, Json]:
    """Text of a thought."""
    return {"type": "summary_text", "text": text}


def message_item(
    reply_id: str, place: int, text: str | None, status: str = "completed"
) -> dict[str, Json]:
    """What is said; None where nothing is said yet."""
    return {
        "id": item_id("msg", reply_id, place),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [] if text is None else [text_part(text)],
    }


def text_part(text: str) -> dict[str, Json]:
    """Text of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(
    reply_id: str, place: int, call: ToolCall, *, custom: bool, status: str = "completed"
) -> dict[str, Json]:
    """A call of a tool."""
    item: dict[str, Json] = {
        "id": item_id("ctc" if custom else "fc", reply_id, place),
        "type": "custom_tool_call" if custom else "function_call",
        "call_id": call.id,
        "name": call.name,
        "status": status,
    }
    if custom:
        item["input"] = custom_input(call.arguments)
    else:
        item["arguments"] = call.arguments
    if call.namespace:
        item["namespace"] = call.namespace
    return item


def custom_input(arguments: str) -> str:
    """The text that a custom tool gets; what is no such object is handed on as it was said."""
    try:
        value: Any = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = cast("dict[str, Any]", value).get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def items_of(ask: Ask, reply: Reply) -> list[Json]:
    """All that a reply says, as items."""
    message, customs = reply.message, custom_tools(ask)
    found: list[Json] = []
    if message.reasoning:
        found.append(reasoning_item(reply.id, 0, message.reasoning))
    if message.text:
        status = "incomplete" if reply.finish == "length" and not message.calls else "completed"
        found.append(message_item(reply.id, len(found), message.text, status))
    for call in message.calls:
        found.append(call_item(reply.id, len(found), call, custom=call.name in customs))
    return found


def response(
    ask: Ask,
    reply_id: str,
    created: int,
    *,
    status: str,
    output: Sequence[Json] = (),
    usage: Usage | None = None,
    error: Json = None,
) -> dict[str, Json]:
    """The response object, as far as it has come.

    The tools are not said again: no client reads them, and a stream has the object three times.
    """
    short: dict[str, Json] = {"reason": "max_output_tokens"}
    wanted = ask.wanted
    return {
        "id": f"resp_{reply_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": short if status == "incomplete" else None,
        "instructions": None,
        "max_output_tokens": ask.max_tokens,
        "model": ask.model,
        "output": list(output),
        "parallel_tool_calls": ask.choice.parallel,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": wanted.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": _choice_of(ask),
        "tools": [],
        "top_p": wanted.top_p,
        "truncation": "disabled",
        "usage": None if usage is None else usage_of(usage),
        "user": None,
        "metadata": {},
    }


def _choice_of(ask: Ask) -> Json:
    mode, custom = ask.choice.mode, custom_tools(ask)
    named: list[Json] = [
        {"type": "custom" if name in custom else "function", "name": name}
        for name in ask.choice.names
    ]
    if mode == "required" and len(named) == 1:
        return named[0]
    return {"type": "allowed_tools", "mode": mode, "tools": named} if named else mode


def usage_of(usage: Usage) -> dict[str, Json]:
    """Counts; cached tokens are among `input_tokens`."""
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.sampled,
    }


def status_of(reply: Reply) -> str:
    """Of a response that has come to its end."""
    return "incomplete" if reply.finish == "length" else "completed"
