"""OpenAI Chat Completions: `/v1/chat/completions`."""

from collections.abc import Callable, Mapping
from functools import partial

from treadle_core.tickets import Json
from treadle_gateway.conversation import (
    Ask,
    Message,
    Part,
    Reply,
    Role,
    Text,
    Tool,
    ToolCall,
)
from treadle_gateway.wires.chat_stream import FINISHES, ChatStream, logprobs_of, usage_of
from treadle_gateway.wires.fields import (
    Fields,
    Object,
    as_array,
    as_name,
    as_object,
    as_text,
    refuse,
)
from treadle_gateway.wires.identity import identity
from treadle_gateway.wires.images import Gallery
from treadle_gateway.wires.parts import parts_of
from treadle_gateway.wires.refusals import openai_refusal
from treadle_gateway.wires.sampling import refuse_denied, room, schema_of, single, wanted
from treadle_gateway.wires.tools import (
    Offered,
    arguments_of,
    kind_name,
    openai_choice,
    tools_of,
    unmet,
)
from treadle_gateway.wires.wire import Begun

_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class Chat:
    """Wire of the Chat Completions API."""

    name = "chat"
    call_prefix = "call_"
    refusal = staticmethod(openai_refusal)

    def ask(self, body: Mapping[str, Json], headers: Mapping[str, str]) -> Ask:
        fields = Fields(body)
        refuse_denied(fields)
        single(fields)
        gallery = Gallery()
        messages = _messages(fields, gallery)
        tools, dropped = _tools(fields)
        choice = openai_choice(fields, tools, _inner)
        return Ask(
            model=fields.model(),
            messages=messages,
            tools=tools,
            choice=choice,
            wanted=wanted(
                fields, schema=schema_of(fields.raw("response_format"), "response_format")
            ),
            max_tokens=room(fields, "max_completion_tokens", "max_tokens"),
            reasoning=_reasoning(fields),
            stream=fields.flag("stream", default=False),
            usage_in_stream=_usage_in_stream(fields),
            logprobs=fields.flag("logprobs", default=False),
            identity=identity(headers),
            ignored=fields.unread() + dropped + unmet(choice, tools),
            media=gallery.media,
            references=gallery.references,
        )

    def reply(self, ask: Ask, reply: Reply) -> dict[str, Json]:
        message = reply.message
        said: dict[str, Json] = {"role": "assistant", "content": message.text or None}
        if not message.calls:
            said["content"] = message.text
        if message.reasoning:
            said["reasoning_content"] = message.reasoning
        if message.calls:
            said["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in message.calls
            ]
        return {
            "id": f"chatcmpl-{reply.id}",
            "object": "chat.completion",
            "created": reply.created,
            "model": ask.model,
            "choices": [
                {
                    "index": 0,
                    "message": said,
                    "logprobs": logprobs_of(reply) if ask.logprobs else None,
                    "finish_reason": FINISHES[reply.finish],
                }
            ],
            "usage": usage_of(reply.usage),
        }

    def stream(self, ask: Ask, begun: Begun) -> ChatStream:
        return ChatStream(ask, begun.id, begun.created)


def _messages(fields: Fields, gallery: Gallery) -> tuple[Message, ...]:
    stated = fields.array("messages")
    if not stated:
        refuse("messages", "at least one message", stated)
    read = partial(_part, gallery)
    return tuple(_message(value, f"messages.{at}", read) for at, value in enumerate(stated))


def _message(value: Json, field: str, read: Callable[[Object, str], Part | None]) -> Message:
    stated = as_object(value, field)
    role = _ROLES.get(str(stated.get("role")))
    if role is None:
        refuse(f"{field}.role", ", ".join(_ROLES), stated.get("role"))
    parts = parts_of(stated.get("content"), f"{field}.content", read)
    if role == "tool":
        call_id = stated.get("tool_call_id")  # absent where an agent reads calls out of the text
        named = "" if call_id is None else as_name(call_id, f"{field}.tool_call_id")
        return Message(role, parts, call_id=named)
    if role == "assistant":
        return Message(role, parts, reasoning=_thoughts(stated, field), calls=_calls(stated, field))
    return Message(role, parts)


def _part(gallery: Gallery, part: Object, field: str) -> Part | None:
    kind = part.get("type")
    if kind == "text":
        text = as_text(part.get("text"), f"{field}.text")
    elif kind == "refusal":
        text = as_text(part.get("refusal"), f"{field}.refusal")
    elif kind == "image_url":
        source = part.get("image_url")
        url = source if isinstance(source, str) else as_object(source, field).get("url")
        return gallery.from_url(as_text(url, f"{field}.image_url.url"), f"{field}.image_url.url")
    else:
        refuse(f"{field}.type", "text or image_url", kind)
    return Text(text) if text else None


def _thoughts(stated: Object, field: str) -> str:
    """What an assistant thought, under either of the names that servers use."""
    for name in ("reasoning_content", "reasoning"):
        thought = stated.get(name)
        if isinstance(thought, str) and thought:
            return thought
    return ""


def _calls(stated: Object, field: str) -> tuple[ToolCall, ...]:
    calls = stated.get("tool_calls")
    if calls is None:
        return ()
    return tuple(
        _call(as_object(call, f"{field}.tool_calls.{at}"), f"{field}.tool_calls.{at}")
        for at, call in enumerate(as_array(calls, f"{field}.tool_calls"))
    )


def _call(call: Object, field: str) -> ToolCall:
    if call.get("type", "function") != "function":
        refuse(f"{field}.type", "function", call.get("type"))
    function = as_object(call.get("function"), f"{field}.function")
    arguments = function.get("arguments")
    return ToolCall(
        id=as_name(call.get("id"), f"{field}.id"),
        name=as_text(function.get("name"), f"{field}.function.name"),
        arguments=""
        if arguments is None
        else arguments_of(arguments, f"{field}.function.arguments"),
    )


def _tools(fields: Fields) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """The functions among the tools, and what else there was."""
    offered: list[Offered] = []
    dropped: list[str] = []
    for at, value in enumerate(fields.array("tools") or ()):
        field = f"tools.{at}"
        tool = as_object(value, field)
        if tool.get("type", "function") != "function":
            dropped.append(kind_name(tool.get("type")))
            continue
        function = as_object(tool.get("function"), f"{field}.function")
        offered.append(
            (
                f"{field}.function",
                function.get("name"),
                function.get("description"),
                function.get("parameters"),
                "",
            )
        )
    return tools_of(offered), tuple(dropped)


def _inner(stated: Object, kind: str) -> Json:
    """What an object of a kind says stands in it under the name of the kind."""
    return stated.get(kind)


def _reasoning(fields: Fields) -> bool:
    """Whether the policy may think; both ways to say no that clients have."""
    effort = fields.text("reasoning_effort")
    return fields.flag("enable_thinking", default=True) and effort != "none"


def _usage_in_stream(fields: Fields) -> bool:
    options = fields.object("stream_options") or {}
    return options.get("include_usage") is True
