"""Token ids in and out: `/inference/v1/generate`, as vLLM has it.

Shapes: P = tokens of the prompt.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_core.tickets import Json
from treadle_gateway.conversation import Reply, Wanted
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.chat_stream import logprobs_of, usage_of
from treadle_gateway.wires.fields import Fields, refuse
from treadle_gateway.wires.identity import identity
from treadle_gateway.wires.refusals import openai_refusal
from treadle_gateway.wires.sampling import refuse_denied, room, single, wanted

_NOT_DONE = ("features", "content_parts", "mm_placeholders")
"""Fields with images; only tokens are taken here."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenAsk:
    """A request for tokens after tokens."""

    model: str
    token_ids: NDArray[np.int32]
    """Whole prompt, [P], P >= 1. Whether the policy knows them all is not checked."""
    wanted: Wanted
    """Without stop texts and without a schema."""
    max_tokens: int | None
    logprobs: bool
    request_id: str
    """The client's own; empty where it has none."""
    identity: Mapping[str, str]
    ignored: tuple[str, ...]


class Generate:
    """Wire of the token endpoint. It does not stream."""

    name = "generate"
    refusal = staticmethod(openai_refusal)

    def ask(self, body: Mapping[str, Json], headers: Mapping[str, str]) -> TokenAsk:
        """What a request asks; names of `headers` are lower-case. Raises RefusedError."""
        fields = Fields(body)
        sampling = Fields(fields.object("sampling_params") or {})
        for part in (fields, sampling):
            refuse_denied(part)
        for name in _NOT_DONE:
            if fields.raw(name) is not None:
                raise RefusedError("invalid", f"{name}: only token_ids are taken", field=name)
        if fields.flag("stream", default=False):
            refuse("stream", "false: tokens are sent in one piece", fields.raw("stream"))
        single(sampling)
        asked = wanted(sampling)
        if asked.stop:
            refuse("sampling_params.stop", "no texts, where tokens are asked for", list(asked.stop))
        return TokenAsk(
            model=fields.model(),
            token_ids=_token_ids(fields.array("token_ids") or ()),
            wanted=asked,
            max_tokens=room(sampling, "max_tokens"),
            logprobs=sampling.whole("logprobs", 0, 1) is not None,
            request_id=(fields.text("request_id") or "")[:128],
            identity=identity(headers),
            ignored=fields.unread() + tuple(f"sampling_params.{n}" for n in sampling.unread()),
        )

    def reply(self, ask: TokenAsk, reply: Reply) -> dict[str, Json]:
        """A whole reply: the tokens as they were sampled, a stop token included."""
        return {
            "request_id": ask.request_id or f"generate-tokens-{reply.id}",
            "choices": [
                {
                    "index": 0,
                    "logprobs": logprobs_of(reply) if ask.logprobs else None,
                    "finish_reason": "length" if reply.finish == "length" else "stop",
                    "token_ids": list(reply.token_ids),
                }
            ],
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "usage": usage_of(reply.usage),
        }


def _token_ids(stated: Sequence[Json]) -> NDArray[np.int32]:
    if not stated:
        refuse("token_ids", "at least one token", list(stated))
    if {int} != set(map(type, stated)):
        refuse("token_ids", "whole numbers", "something else among them")
    try:
        found = np.asarray(stated, np.int64)
    except OverflowError:
        found = np.full(1, -1)
    if found.min() < 0 or found.max() >= 2**31:
        refuse("token_ids", "whole numbers from 0 to 2147483647", "one beyond")
    return found.astype(np.int32)
