"""Anthropic Messages: `/v1/messages` and `/v1/messages/count_tokens`."""

import json
from collections.abc import Iterable, Mapping, Sequence

from treadle_core.tickets import Json
from treadle_gateway.conversation import (
    Ask,
    Message,
    Part,
    Reply,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from treadle_gateway.errors import RefusedError
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
from treadle_gateway.wires.messages_stream import (
    MessagesStream,
    signature,
    stop_reason,
    usage_of,
)
from treadle_gateway.wires.refusals import anthropic_refusal
from treadle_gateway.wires.sampling import refuse_denied, room, schema_of, wanted
from treadle_gateway.wires.tools import (
    Offered,
    arguments_text,
    called_with,
    chosen,
    kind_name,
    tools_of,
    unmet,
)
from treadle_gateway.wires.wire import Begun


class Messages:
    """Wire of the Messages API."""

    name = "messages"
    call_prefix = "toolu_"
    refusal = staticmethod(anthropic_refusal)

    def ask(self, body: Mapping[str, Json], headers: Mapping[str, str]) -> Ask:
        fields = Fields(body)
        refuse_denied(fields)
        _refuse_thread(fields)
        reader = _Reader()
        messages = reader.system(fields) + reader.messages(fields)
        tools = reader.tools(fields)
        choice = _choice(fields, tools)
        return Ask(
            model=fields.model(),
            messages=messages,
            tools=tools,
            choice=choice,
            wanted=wanted(fields, stop="stop_sequences", schema=_schema(fields)),
            max_tokens=room(fields, "max_tokens"),
            reasoning=_reasoning(fields),
            stream=fields.flag("stream", default=False),
            identity=identity(headers),
            ignored=fields.unread() + tuple(reader.dropped) + unmet(choice, tools),
            media=reader.gallery.media,
            references=reader.gallery.references,
        )

    def reply(self, ask: Ask, reply: Reply) -> dict[str, Json]:
        message = reply.message
        content: list[Json] = []
        if message.reasoning:
            content.append(
                {
                    "type": "thinking",
                    "thinking": message.reasoning,
                    "signature": signature(reply.id, 0),
                }
            )
        if message.text:
            content.append({"type": "text", "text": message.text})
        for call in message.calls:
            stated = called_with(call.arguments)
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": stated})
        return {
            "id": f"msg_{reply.id}",
            "type": "message",
            "role": "assistant",
            "model": ask.model,
            "content": content,
            "stop_reason": stop_reason(reply),
            "stop_sequence": reply.stop or None,
            "usage": usage_of(reply.usage.prompt, reply.usage.cached, reply.usage.sampled),
        }

    def stream(self, ask: Ask, begun: Begun) -> MessagesStream:
        return MessagesStream(ask, begun.id, begun.prompt_tokens, begun.cached_tokens)


def counted(prompt_tokens: int) -> dict[str, Json]:
    """Reply of `count_tokens`; its request is read as one for a message."""
    return {"input_tokens": prompt_tokens}


def _refuse_thread(fields: Fields) -> None:
    """Conversations are not kept here by name; a client that hears so sends them whole."""
    if fields.raw("thread") is not None:
        raise RefusedError(
            "invalid",
            "thread: conversations are not stored here; send the whole history in messages",
            field="thread",
            code="thread_unsupported_request",
        )


class _Reader:
    """Reads what is said in one request."""

    def __init__(self) -> None:
        self.gallery = Gallery()
        self.dropped: list[str] = []
        """What was left out."""
        self._referenced: set[str] = set()
        """Names of tools that a search has found."""

    def system(self, fields: Fields) -> tuple[Message, ...]:
        stated = fields.raw("system")
        if stated is None:
            return ()
        parts = tuple(self._parts(stated, "system"))
        return (Message("system", parts),) if parts else ()

    def messages(self, fields: Fields) -> tuple[Message, ...]:
        stated = fields.array("messages")
        if not stated:
            refuse("messages", "at least one message", stated)
        found: list[Message] = []
        for at, value in enumerate(stated):
            field = f"messages.{at}"
            message = as_object(value, field)
            role = message.get("role")
            content = message.get("content")
            if role == "assistant":
                found.append(self._assistant(content, f"{field}.content"))
            elif role == "user":
                found += self._user(content, f"{field}.content")
            elif role == "system":
                found.append(Message("system", tuple(self._parts(content, f"{field}.content"))))
            else:
                refuse(f"{field}.role", "user, assistant or system", role)
        return tuple(found)

    def _blocks(self, content: Json, field: str) -> Iterable[tuple[str, Object]]:
        if isinstance(content, str):
            yield field, {"type": "text", "text": content}
            return
        for at, value in enumerate(as_array(content, field)):
            yield f"{field}.{at}", as_object(value, f"{field}.{at}")

    def _user(self, content: Json, field: str) -> list[Message]:
        """Results of tools are messages of their own, in the order of the blocks."""
        found: list[Message] = []
        parts: list[Part] = []
        for place, block in self._blocks(content, field):
            if block.get("type") != "tool_result":
                parts += self._part(block, place)
                continue
            if parts:
                found.append(Message("user", tuple(parts)))
                parts = []
            found.append(self._result(block, place))
        if parts or not found:
            found.append(Message("user", tuple(parts)))
        return found

    def _result(self, block: Object, field: str) -> Message:
        content = block.get("content")
        return Message(
            "tool",
            () if content is None else tuple(self._parts(content, f"{field}.content")),
            call_id=as_name(block.get("tool_use_id"), f"{field}.tool_use_id"),
            is_error=block.get("is_error") is True,
        )

    def _assistant(self, content: Json, field: str) -> Message:
        thoughts: list[str] = []
        parts: list[Part] = []
        calls: list[ToolCall] = []
        for place, block in self._blocks(content, field):
            kind = block.get("type")
            if kind == "thinking":
                thoughts.append(as_text(block.get("thinking"), f"{place}.thinking"))
            elif kind == "redacted_thinking":
                self.dropped.append("messages.redacted_thinking")
            elif kind == "tool_use":
                stated = as_object(block.get("input") or {}, f"{place}.input")
                calls.append(
                    ToolCall(
                        id=as_name(block.get("id"), f"{place}.id"),
                        name=as_text(block.get("name"), f"{place}.name"),
                        arguments=arguments_text(stated),
                    )
                )
            else:
                parts += self._part(block, place)
        return Message("assistant", tuple(parts), reasoning="".join(thoughts), calls=tuple(calls))

    def _parts(self, content: Json, field: str) -> list[Part]:
        return [
            part
            for place, block in self._blocks(content, field)
            for part in self._part(block, place)
        ]

    def _part(self, block: Object, field: str) -> Sequence[Part]:
        kind = block.get("type")
        if kind == "text":
            text = as_text(block.get("text"), f"{field}.text")
        elif kind == "image":
            return (self._image(as_object(block.get("source"), f"{field}.source"), field),)
        elif kind == "document":
            source = as_object(block.get("source"), f"{field}.source")
            if source.get("type") != "text":
                refuse(f"{field}.source.type", "text", source.get("type"))
            text = as_text(source.get("data"), f"{field}.source.data")
        elif kind == "tool_reference":
            name = as_text(block.get("tool_name"), f"{field}.tool_name")
            self._referenced.add(name)
            text = json.dumps({"type": "tool_reference", "tool_name": name}, ensure_ascii=False)
        else:
            refuse(f"{field}.type", "a block of text, an image, a call or its result", kind)
        return (Text(text),) if text else ()

    def _image(self, source: Object, field: str) -> Part:
        if source.get("type") == "base64":
            return self.gallery.from_base64(
                as_text(source.get("media_type"), f"{field}.source.media_type"),
                as_text(source.get("data"), f"{field}.source.data"),
                f"{field}.source.data",
            )
        if source.get("type") == "url":
            url = as_text(source.get("url"), f"{field}.source.url")
            return self.gallery.from_url(url, f"{field}.source.url")
        return refuse(f"{field}.source.type", "base64 or url", source.get("type"))

    def tools(self, fields: Fields) -> tuple[Tool, ...]:
        """What may be called. One that is to be loaded later is there once a search found it."""
        offered: list[Offered] = []
        for at, value in enumerate(fields.array("tools") or ()):
            tool = as_object(value, f"tools.{at}")
            if tool.get("type") not in (None, "custom"):
                self.dropped.append(kind_name(tool.get("type")))
                continue
            name = tool.get("name")
            if tool.get("defer_loading") is True and str(name) not in self._referenced:
                continue
            schema = tool.get("input_schema")
            offered.append((f"tools.{at}", name, tool.get("description"), schema, ""))
        return tools_of(offered)


_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "required"}


def _choice(fields: Fields, tools: tuple[Tool, ...]) -> ToolChoice:
    stated = fields.object("tool_choice")
    if stated is None:
        return ToolChoice()
    kind = stated.get("type")
    mode = _CHOICES.get(str(kind))
    if mode is None:
        refuse("tool_choice.type", "auto, any, tool or none", kind)
    names = (as_name(stated.get("name"), "tool_choice.name"),) if kind == "tool" else ()
    parallel = stated.get("disable_parallel_tool_use") is not True
    return chosen(mode, names, tools, parallel=parallel)


def _schema(fields: Fields) -> Mapping[str, Json] | None:
    """The form of the text, under its present name or its older one."""
    config = fields.object("output_config") or {}
    if config.get("format") is not None:
        return schema_of(config.get("format"), "output_config.format")
    return schema_of(fields.raw("output_format"), "output_format")


def _reasoning(fields: Fields) -> bool:
    thinking = fields.object("thinking") or {}
    return thinking.get("type") != "disabled"
