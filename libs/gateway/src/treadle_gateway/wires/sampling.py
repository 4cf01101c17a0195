"""How a client wants the policy to sample, as the wires say it."""

import dataclasses
from collections.abc import Mapping

from treadle_core.tickets import Json
from treadle_gateway.conversation import Wanted
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.fields import Fields, as_number, as_object, as_text, refuse
from treadle_gateway.wires.schemas import check_schema

MAX_STOPS = 16
MAX_STOP = 256
"""Characters."""
MAX_TOKENS = 2**31 - 1
"""More is the same: the context bounds it far below."""
MAX_BIASES = 1024

_DENIED = frozenset({
    "chat_template", "chat_template_kwargs", "documents", "kv_transfer_params", "logits_processors",
    "lora", "lora_id", "lora_name", "lora_path", "lora_request", "lora_weights", "media_io_kwargs",
    "mm_processor_kwargs", "multi_modal_data", "prompt_embeds", "vllm_xargs",
})  # fmt: skip
"""Would reach into the template, the files or the memory of an engine."""

_UNSUPPORTED: Mapping[str, tuple[Json, ...]] = {
    "allowed_token_ids": ([],), "bad_words": ([],), "best_of": (1,), "echo": (False,),
    "continue_final_message": (False,), "function_call": ("none",), "functions": ([],),
    "guided_choice": (), "guided_decoding": (), "guided_grammar": (), "guided_json": (),
    "guided_regex": (), "ignore_eos": (False,), "include_stop_str_in_output": (False,),
    "length_penalty": (1,), "min_tokens": (0,), "prompt_logprobs": (0,), "structured_outputs": (),
    "thinking_token_budget": (), "truncate_prompt_tokens": (), "typical_p": (1,),
    "use_beam_search": (False,),
}  # fmt: skip
"""Would change what is sampled or said, and is not done here; with values that change nothing."""

_PARAMETERS = frozenset(each.name for each in dataclasses.fields(Wanted)) - {"stop", "schema"}
"""What `wanted` reads beside stop texts and a schema, which have other names on some wires."""


def refuse_denied(fields: Fields) -> None:
    """Raises RefusedError, naming the field, where one of them may not be there."""
    for name in fields.stated(_DENIED):
        raise RefusedError(
            "invalid", f"{name}: not allowed here", field=name, code="unsupported_parameter"
        )
    for name in fields.stated(_UNSUPPORTED.keys()):
        if fields.raw(name) not in _UNSUPPORTED[name]:
            raise RefusedError(
                "invalid", f"{name}: not supported here", field=name, code="unsupported_parameter"
            )


def single(fields: Fields, name: str = "n") -> None:
    """Raises RefusedError where a client wants several replies to one request."""
    count = fields.whole(name, 1, 128)
    if count not in (None, 1):
        raise RefusedError(
            "invalid", f"{name} must be 1 in a capture session, got {count}", field=name
        )


def room(fields: Fields, *names: str) -> int | None:
    """The first stated of several names of the most tokens of a reply."""
    found: int | None = None
    for name in names:
        value = fields.raw(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            refuse(name, "a whole number of at least 1", value)
        found = min(value, MAX_TOKENS) if found is None else found
    return found


def wanted(
    fields: Fields, *, stop: str = "stop", schema: Mapping[str, Json] | None = None
) -> Wanted:
    """Everything that changes what is sampled; `stop` names the field with stop texts."""
    if not fields.stated(_PARAMETERS | {stop}):  # as most requests are
        return Wanted(schema=schema)
    return Wanted(
        temperature=fields.number("temperature", 0, 2),
        top_p=_share(fields, "top_p"),
        top_k=fields.whole("top_k", -1, 2**31 - 1),
        min_p=fields.number("min_p", 0, 1),
        seed=fields.whole("seed", -(2**63), 2**63 - 1),
        presence_penalty=fields.number("presence_penalty", -2, 2),
        frequency_penalty=fields.number("frequency_penalty", -2, 2),
        repetition_penalty=_share(fields, "repetition_penalty", high=10),
        logit_bias=_biases(fields),
        stop=_stops(fields, stop),
        schema=schema,
    )


def _share(fields: Fields, name: str, high: float = 1) -> float | None:
    value = fields.number(name, 0, high)
    if value == 0:
        refuse(name, f"a number above 0 and at most {high:g}", 0)
    return value


def _biases(fields: Fields) -> dict[int, float]:
    stated = fields.object("logit_bias") or {}
    if len(stated) > MAX_BIASES:
        refuse("logit_bias", f"at most {MAX_BIASES} tokens", len(stated))
    found: dict[int, float] = {}
    for token, bias in stated.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            refuse("logit_bias", "token ids as names", token)
        found[int(token)] = as_number(bias, f"logit_bias.{token}", -100, 100)
    return found


def _stops(fields: Fields, name: str) -> tuple[str, ...]:
    stated = fields.raw(name)
    if stated is None:
        return ()
    texts = stated if isinstance(stated, list) else [stated]
    if len(texts) > MAX_STOPS:
        refuse(name, f"at most {MAX_STOPS} texts", len(texts))
    for text in texts:
        if not 1 <= len(as_text(text, name)) <= MAX_STOP:
            refuse(name, f"texts of 1 to {MAX_STOP} characters", text)
    return tuple(dict.fromkeys(as_text(text, name) for text in texts))


def schema_of(stated: Json, field: str) -> Mapping[str, Json] | None:
    """What a client says about the form of the text; None is any text, `{}` any JSON object.

    Reads `{"type": "text" | "json_object" | "json_schema", "schema": ...}`, where Chat Completions
    has one more object around `schema`.
    """
    if stated is None:
        return None
    form = as_object(stated, field)
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema":
        refuse(f"{field}.type", "text, json_object or json_schema", kind)
    around = as_object(form.get("json_schema", stated), f"{field}.json_schema")
    schema = as_object(around.get("schema"), f"{field}.schema")
    check_schema(schema, f"{field}.schema")
    return schema
