"""Messages as a stream of events: blocks open and close one after the other."""

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
)
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires import sse
from treadle_gateway.wires.refusals import anthropic_error


class MessagesStream:
    """One reply as events."""

    def __init__(self, ask: Ask, reply_id: str, prompt_tokens: int, cached_tokens: int) -> None:
        self._ask = ask
        self._id = reply_id
        self._prompt = prompt_tokens
        self._cached = cached_tokens
        self._open = ""
        """Type of the block that is open, if any."""
        self._index = -1
        """Of the block that was opened last."""

    def start(self) -> bytes:
        message: dict[str, Json] = {
            "id": f"msg_{self._id}",
            "type": "message",
            "role": "assistant",
            "model": self._ask.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(self._prompt, self._cached, 0),
        }
        return _event({"type": "message_start", "message": message})

    def event(self, event: Event) -> bytes:
        match event:
            case ReasoningDelta(text):
                opened = self._in("thinking", {"thinking": "", "signature": ""})
                return opened + self._delta("thinking_delta", "thinking", text)
            case TextDelta(text):
                return self._in("text", {"text": ""}) + self._delta("text_delta", "text", text)
            case CallStarted(call_id, name):
                # Two calls in a row are two blocks.
                closed = self._close()
                return closed + self._in("tool_use", {"id": call_id, "name": name, "input": {}})
            case ArgumentsDelta(text):
                return self._delta("input_json_delta", "partial_json", text)
            case CallEnded():
                return self._close()

    def end(self, reply: Reply) -> bytes:
        delta: dict[str, Json] = {
            "stop_reason": stop_reason(reply),
            "stop_sequence": reply.stop or None,
        }
        usage = usage_of(self._prompt, self._cached, reply.usage.sampled)
        return (
            self._close()
            + _event({"type": "message_delta", "delta": delta, "usage": usage})
            + _event({"type": "message_stop"})
        )

    def failed(self, error: RefusedError) -> bytes:
        return sse.named("error", anthropic_error(error))

    def ping(self) -> bytes:
        return _event({"type": "ping"})

    def _in(self, kind: str, empty: dict[str, Json]) -> bytes:
        """Opens a block of a kind, unless one is open."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        block: dict[str, Json] = {"type": kind, **empty}
        return closed + _event(
            {"type": "content_block_start", "index": self._index, "content_block": block}
        )

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        delta: dict[str, Json] = {"type": kind, name: text}
        return _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        """Closes the block that is open, if any."""
        if not self._open:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta("signature_delta", "signature", signature(self._id, self._index))
        self._open = ""
        return signed + _event({"type": "content_block_stop", "index": self._index})


def _event(value: dict[str, Json]) -> bytes:
    return sse.named(str(value["type"]), value)


def signature(reply_id: str, index: int) -> str:
    """Signature of a thinking block. Some clients drop thoughts that have none."""
    return f"{reply_id}{index:08x}"


def stop_reason(reply: Reply) -> str:
    """Why a reply ended, in the words of Messages."""
    if reply.finish == "calls":
        return "tool_use"
    if reply.finish == "length":
        return "max_tokens"
    return "stop_sequence" if reply.stop else "end_turn"


def usage_of(prompt: int, cached: int, sampled: int) -> dict[str, Json]:
    """Counts; tokens that were read from a cache are not among `input_tokens`."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": sampled,
        "service_tier": "standard",
    }
