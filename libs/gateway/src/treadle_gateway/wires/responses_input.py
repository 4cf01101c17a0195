"""Input of the Responses API: items -> messages.

What one reply said comes back as several items: they are one message again.
"""

import json
import re
from collections.abc import Iterable

from treadle_core.tickets import Json
from treadle_gateway.conversation import Message, Part, Role, Text, ToolCall
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.fields import Object, as_array, as_name, as_object, as_text, refuse
from treadle_gateway.wires.images import Gallery
from treadle_gateway.wires.parts import parts_of

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user"}
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")

_OWN_ID = re.compile(r"(?:rs|msg|fc|ctc)_([0-9a-f]{32})[0-9a-f]{4}")
"""Id of an item that we made: the reply's id and a place."""

_THOUGHT = re.compile(r"\s*<think>\n?((?:(?!</think>).)*?)\n?</think>\s*", re.DOTALL)
"""An assistant's text that is a thought: some clients write a reasoning item so."""

_STATEFUL = {
    "compaction_trigger": "conversations are not compacted here; ask for a summary instead",
    "compaction": "what another server encrypted cannot be read here",
    "item_reference": "items are not stored here; send the item itself",
}


class ItemReader:
    """Reads the items of one request in their order."""

    def __init__(self) -> None:
        self.gallery = Gallery()
        self._found: list[Message] = []
        self._thoughts: list[str] = []
        self._parts: list[Part] = []
        self._calls: list[ToolCall] = []
        self._reply = ""
        """Id of the reply whose items are being gathered, where it is known."""

    def messages(self, stated: Json) -> list[Message]:
        """Messages of `input`: a string is what the user says."""
        if isinstance(stated, str):
            return [Message("user", (Text(stated),) if stated else ())]
        if not stated:
            refuse("input", "a string or at least one item", stated)
        for at, value in enumerate(as_array(stated, "input")):
            self._item(as_object(value, f"input.{at}"), f"input.{at}")
        self._flush()
        return self._found

    def _item(self, item: Object, field: str) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._message(item, field)
        elif kind == "reasoning":
            self._begin(item, thinks=True)
            self._thoughts.append(_thought(item, field))
        elif kind in ("function_call", "custom_tool_call"):
            self._begin(item)
            self._calls.append(_call(item, field))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = as_name(item.get("call_id"), f"{field}.call_id")
            parts = parts_of(item.get("output"), f"{field}.output", self._part)
            self._flush()
            self._found.append(Message("tool", parts, call_id=call_id))
        elif isinstance(kind, str) and kind in _STATEFUL:
            raise RefusedError(
                "invalid", f"{field}: {kind}: {_STATEFUL[str(kind)]}", field=field, code=str(kind)
            )
        else:
            refuse(f"{field}.type", "a message, reasoning, a call or its output", kind)

    def _message(self, item: Object, field: str) -> None:
        role = item.get("role")
        if role == "assistant":
            parts = parts_of(item.get("content"), f"{field}.content", self._part)
            thought = _THOUGHT.fullmatch("".join(p.text for p in parts if isinstance(p, Text)))
            self._begin(item, thinks=thought is not None)
            if thought:
                self._thoughts.append(thought.group(1))
            else:
                self._parts += parts
            return
        known = _ROLES.get(str(role))
        if known is None:
            refuse(f"{field}.role", "system, developer, user or assistant", role)
        parts = parts_of(item.get("content"), f"{field}.content", self._part)
        self._flush()
        self._found.append(Message(known, parts))

    def _begin(self, item: Object, *, thinks: bool = False) -> None:
        """Ends the reply that is being gathered where this item belongs to another one.

        Ids of our own tell. Without them a thought opens a reply.
        """
        own = _OWN_ID.fullmatch(str(item.get("id")))
        reply = own.group(1) if own else ""
        said = bool(self._parts or self._calls)
        if reply and self._reply:
            if reply != self._reply:
                self._flush()
        elif thinks and said:
            self._flush()
        self._reply = reply or self._reply

    def _flush(self) -> None:
        if self._thoughts or self._parts or self._calls:
            self._found.append(
                Message(
                    "assistant",
                    tuple(self._parts),
                    reasoning="".join(self._thoughts),
                    calls=tuple(self._calls),
                )
            )
        self._thoughts, self._parts, self._calls, self._reply = [], [], [], ""

    def _part(self, part: Object, field: str) -> Part | None:
        kind = part.get("type")
        if kind in _TEXTS:
            text = as_text(part.get("text"), f"{field}.text")
        elif kind == "refusal":
            text = as_text(part.get("refusal"), f"{field}.refusal")
        elif kind == "input_image":
            url = as_text(part.get("image_url"), f"{field}.image_url")
            return self.gallery.from_url(url, f"{field}.image_url")
        else:
            refuse(f"{field}.type", "input_text, output_text or input_image", kind)
        return Text(text) if text else None


def _thought(item: Object, field: str) -> str:
    """What a reasoning item says: its content, or the summary of a client that keeps no other."""
    for name in ("content", "summary"):
        texts = list(_texts(item.get(name), f"{field}.{name}"))
        if texts:
            return "".join(texts)
    return ""


def _texts(stated: Json, field: str) -> Iterable[str]:
    if stated is None:
        return
    for at, value in enumerate(as_array(stated, field)):
        part = as_object(value, f"{field}.{at}")
        yield as_text(part.get("text"), f"{field}.{at}.text")


def _call(item: Object, field: str) -> ToolCall:
    if item.get("type") == "custom_tool_call":
        arguments = json.dumps(
            {"input": as_text(item.get("input"), f"{field}.input")}, ensure_ascii=False
        )
    else:
        arguments = as_text(item.get("arguments"), f"{field}.arguments")
    namespace = item.get("namespace")
    return ToolCall(
        id=as_name(item.get("call_id"), f"{field}.call_id"),
        name=as_text(item.get("name"), f"{field}.name"),
        arguments=arguments,
        namespace="" if namespace is None else as_text(namespace, f"{field}.namespace"),
    )
