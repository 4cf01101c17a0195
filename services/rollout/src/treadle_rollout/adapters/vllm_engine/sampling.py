"""How a turn is sampled, in vLLM's words: every parameter is said, none is left to a default."""

import json
from typing import Any

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling

LEAST_TEMPERATURE = 0.01
"""vLLM raises a temperature below this to it, but for 0."""

_LEAST_TOP_P = 1e-6
"""Stands for 0, which vLLM refuses: the likeliest token alone."""


def check_temperature(sampling: Sampling) -> None:
    """Raises InvalidFieldError for a temperature that vLLM would change."""
    if 0 < sampling.temperature < LEAST_TEMPERATURE:
        limit = f"0, or >= {LEAST_TEMPERATURE}"
        raise InvalidFieldError("temperature", limit=limit, value=sampling.temperature)


def parameters(sampling: Sampling, *, room: int, stops: frozenset[int]) -> dict[str, Any]:
    """Parameters of one call that `room` more tokens fit into the context of."""
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "max_tokens": min(sampling.max_tokens, room),
        "min_tokens": 0,
        "top_p": max(sampling.top_p, _LEAST_TOP_P),
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        # vLLM has none below -2**63 or above 2**63 - 1, and takes -1 for none at all.
        "seed": None if sampling.seed is None else sampling.seed % 2**63,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
        # Stop tokens are the engine's alone: the tokenizer's own end is one of them, or is none.
        "stop": None,
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,
        "bad_words": None,
        "allowed_token_ids": None,
    }


def grammar_of(sampling: Sampling) -> str | None:
    """The grammar that the turn obeys, in llguidance's Lark; None where it may be any."""
    if sampling.schema is not None:
        schema = json.dumps(sampling.schema or {"type": "object"}, sort_keys=True)
        return f"start: %json {schema}"
    return sampling.grammar or None
