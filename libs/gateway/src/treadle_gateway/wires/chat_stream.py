"""Chat Completions as a stream of chunks."""

from collections.abc import Mapping

from treadle_core.tickets import Json
from treadle_gateway.conversation import (
    ArgumentsDelta,
    Ask,
    CallStarted,
    Event,
    Finish,
    ReasoningDelta,
    Reply,
    TextDelta,
    Usage,
)
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires import sse
from treadle_gateway.wires.refusals import openai_error

FINISHES: Mapping[Finish, str] = {"stop": "stop", "length": "length", "calls": "tool_calls"}

_ONGOING = '"logprobs":null,"finish_reason":null'


class ChatStream:
    """One reply as chunks; the first says the role, the last the reason of its end."""

    def __init__(self, ask: Ask, reply_id: str, created: int) -> None:
        self._ask = ask
        self._head: dict[str, Json] = {
            "id": f"chatcmpl-{reply_id}",
            "object": "chat.completion.chunk",
            "created": created,
            "model": ask.model,
        }
        # Every chunk begins alike, and there is one for every token.
        self._opening = f'data: {sse.dumps(self._head)[:-1]},"choices":[{{"index":0,"delta":'
        self._calls = 0

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: Event) -> bytes:
        match event:
            case ReasoningDelta(text):
                return self._chunk({"reasoning_content": text})
            case TextDelta(text):
                return self._chunk({"content": text})
            case CallStarted(call_id, name):
                self._calls += 1
                function: dict[str, Json] = {"name": name, "arguments": ""}
                return self._call({"id": call_id, "type": "function", "function": function})
            case ArgumentsDelta(text):
                return self._call({"function": {"arguments": text}})
            case _:
                return b""

    def end(self, reply: Reply) -> bytes:
        logprobs = logprobs_of(reply) if self._ask.logprobs else None
        said = self._chunk({}, finish=FINISHES[reply.finish], logprobs=logprobs)
        if self._ask.usage_in_stream:
            said += sse.data({**self._head, "choices": [], "usage": usage_of(reply.usage)})
        return said + b"data: [DONE]\n\n"

    def failed(self, error: RefusedError) -> bytes:
        return sse.data(openai_error(error))

    def ping(self) -> bytes:
        return sse.COMMENT

    def _call(self, call: dict[str, Json]) -> bytes:
        return self._chunk({"tool_calls": [{"index": self._calls - 1, **call}]})

    def _chunk(
        self, delta: dict[str, Json], *, finish: str | None = None, logprobs: Json = None
    ) -> bytes:
        ending = _ONGOING
        if finish is not None:
            ending = f'"logprobs":{sse.dumps(logprobs)},"finish_reason":{sse.dumps(finish)}'
        return f"{self._opening}{sse.dumps(delta)},{ending}}}]}}\n\n".encode("ascii")


def usage_of(usage: Usage) -> dict[str, Json]:
    """Counts, as Chat Completions and Completions state them."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def logprobs_of(reply: Reply) -> dict[str, Json]:
    """One entry for every token that was sampled, reasoning and markup included.

    A token is named by its id: ids come from the engine, and a text does not tell them.
    """
    entries: list[Json] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(reply.token_ids, reply.logprobs, strict=True)
    ]
    return {"content": entries, "refusal": None}
