"""Responses as a stream of events: items open and close one after the other."""

from treadle_core.tickets import Json
from treadle_gateway.conversation import (
    ArgumentsDelta,
    Ask,
    CallEnded,
    CallStarted,
    Event,
    ReasoningDelta,
    Reply,
    TextDelta,
    ToolCall,
)
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires import sse
from treadle_gateway.wires.refusals import openai_code, openai_words
from treadle_gateway.wires.responses_output import (
    call_item,
    custom_input,
    custom_tools,
    item_id,
    message_item,
    reasoning_item,
    response,
    status_of,
    summary_part,
    text_part,
)

_FAILURES = ("rate_limit_exceeded", "server_error", "invalid_prompt")
"""Codes of a response that failed, as the API knows them."""


class ResponsesStream:
    """One reply as numbered events."""

    def __init__(self, ask: Ask, reply_id: str, created: int) -> None:
        self._ask = ask
        self._id = reply_id
        self._created = created
        self._customs = custom_tools(ask)
        self._number = 0
        self._open = ""
        """`reasoning`, `message`, `function` or `custom`, while an item of that kind is open."""
        self._call = ToolCall("", "", "")
        self._texts: list[str] = []
        """What the open item has said."""
        self._done: list[Json] = []
        """Items that are whole."""

    def start(self) -> bytes:
        return self._stage("created", "in_progress") + self._stage("in_progress", "in_progress")

    def event(self, event: Event) -> bytes:
        match event:
            case ReasoningDelta(text):
                opened = b"" if self._open == "reasoning" else self._close() + self._think()
                return opened + self._said("reasoning_summary_text.delta", text, "summary_index")
            case TextDelta(text):
                opened = b"" if self._open == "message" else self._close() + self._speak()
                return opened + self._said("output_text.delta", text, "content_index", logprobs=[])
            case CallStarted(call_id, name, namespace):
                return self._close() + self._begin_call(ToolCall(call_id, name, "", namespace))
            case ArgumentsDelta(text):
                if self._open == "custom":  # its input is known once the arguments are whole
                    self._texts.append(text)
                    return b""
                return self._said("function_call_arguments.delta", text)
            case CallEnded():
                return self._close()

    def end(self, reply: Reply) -> bytes:
        status = status_of(reply)
        closed = self._close(status)
        whole = response(
            self._ask,
            self._id,
            self._created,
            status=status,
            output=self._done,
            usage=reply.usage,
        )
        return closed + self._event(status, response=whole)

    def failed(self, error: RefusedError) -> bytes:
        code = openai_code(error)
        said: dict[str, Json] = {
            "code": code if code in _FAILURES else "server_error",
            "message": openai_words(error),
        }
        whole = response(
            self._ask, self._id, self._created, status="failed", output=self._done, error=said
        )
        return self._event("failed", response=whole)

    def ping(self) -> bytes:
        """An event, since some clients count only those as signs of life."""
        return self._stage("in_progress", "in_progress")

    def _event(self, kind: str, **fields: Json) -> bytes:
        name = f"response.{kind}"
        said: dict[str, Json] = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return sse.named(name, said)

    def _stage(self, kind: str, status: str) -> bytes:
        whole = response(self._ask, self._id, self._created, status=status)
        return self._event(kind, response=whole)

    def _at(self, prefix: str, index: str = "") -> dict[str, Json]:
        """Where the open item stands."""
        place = len(self._done)
        found: dict[str, Json] = {
            "item_id": item_id(prefix, self._id, place),
            "output_index": place,
        }
        return found | ({index: 0} if index else {})

    @property
    def _prefix(self) -> str:
        return {"reasoning": "rs", "message": "msg", "function": "fc", "custom": "ctc"}[self._open]

    def _said(self, kind: str, text: str, index: str = "", **fields: Json) -> bytes:
        self._texts.append(text)
        return self._event(kind, **self._at(self._prefix, index), delta=text, **fields)

    def _added(self, item: dict[str, Json]) -> bytes:
        return self._event("output_item.added", output_index=len(self._done), item=item)

    def _think(self) -> bytes:
        self._open = "reasoning"
        item = reasoning_item(self._id, len(self._done), "")
        return self._added(item) + self._event(
            "reasoning_summary_part.added", **self._at("rs", "summary_index"), part=summary_part("")
        )

    def _speak(self) -> bytes:
        self._open = "message"
        item = message_item(self._id, len(self._done), None, "in_progress")
        return self._added(item) + self._event(
            "content_part.added", **self._at("msg", "content_index"), part=text_part("")
        )

    def _begin_call(self, call: ToolCall) -> bytes:
        custom = call.name in self._customs
        self._open = "custom" if custom else "function"
        self._call = call
        place = len(self._done)
        return self._added(call_item(self._id, place, call, custom=custom, status="in_progress"))

    def _close(self, status: str = "completed") -> bytes:
        """Says all of the open item once more, if any is open, and that it is whole."""
        if not self._open:
            return b""
        text, place = "".join(self._texts), len(self._done)
        if self._open == "reasoning":
            said = self._close_thought(text)
            item = reasoning_item(self._id, place, text)
        elif self._open == "message":
            said = self._close_text(text)
            item = message_item(self._id, place, text, status)
        else:
            custom = self._open == "custom"
            call = ToolCall(self._call.id, self._call.name, text, self._call.namespace)
            said = self._close_custom(text) if custom else self._close_call(call)
            item = call_item(self._id, place, call, custom=custom, status=status)
        said += self._event("output_item.done", output_index=place, item=item)
        self._done.append(item)
        self._open, self._texts = "", []
        return said

    def _close_thought(self, text: str) -> bytes:
        at = self._at("rs", "summary_index")
        return self._event("reasoning_summary_text.done", **at, text=text) + self._event(
            "reasoning_summary_part.done", **at, part=summary_part(text)
        )

    def _close_text(self, text: str) -> bytes:
        at = self._at("msg", "content_index")
        return self._event("output_text.done", **at, text=text, logprobs=[]) + self._event(
            "content_part.done", **at, part=text_part(text)
        )

    def _close_call(self, call: ToolCall) -> bytes:
        return self._event(
            "function_call_arguments.done",
            **self._at("fc"),
            arguments=call.arguments,
            name=call.name,
        )

    def _close_custom(self, arguments: str) -> bytes:
        text, at = custom_input(arguments), self._at("ctc")
        return self._event("custom_tool_call_input.delta", **at, delta=text) + self._event(
            "custom_tool_call_input.done", **at, input=text
        )
