"""Token ids in, token ids out."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from treadle_gateway.conversation import Reply
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.generate import Generate, TokenAsk


def ask(**fields: Any) -> TokenAsk:
    return Generate().ask({"model": "policy", "token_ids": [1, 2, 3], **fields}, {})


def test_a_request_as_a_training_client_sends_it_is_read() -> None:
    found = ask(
        sampling_params={
            "max_tokens": 8,
            "temperature": 1.0,
            "logprobs": 1,
            "n": 1,
            "skip_special_tokens": False,
            "stop_token_ids": [2],
        },
        cache_salt="s",
        priority=0,
    )
    assert found.token_ids.dtype == np.int32
    assert found.token_ids.tolist() == [1, 2, 3]
    assert (found.max_tokens, found.wanted.temperature, found.logprobs) == (8, 1.0, True)
    assert found.ignored == (
        "cache_salt",
        "priority",
        "sampling_params.skip_special_tokens",
        "sampling_params.stop_token_ids",
    )
    assert not ask().logprobs


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"token_ids": []}, "token_ids", id="no-tokens"),
        pytest.param({"token_ids": "12"}, "token_ids", id="text"),
        pytest.param({"token_ids": [1, 2.0]}, "token_ids", id="no-whole-number"),
        pytest.param({"token_ids": [1, True]}, "token_ids", id="truth"),
        pytest.param({"token_ids": [1, -1]}, "token_ids", id="below-zero"),
        pytest.param({"token_ids": [2**31]}, "token_ids", id="too-large"),
        pytest.param({"token_ids": [10**30]}, "token_ids", id="far-too-large"),
        pytest.param({"features": {}}, "features", id="images"),
        pytest.param({"stream": True}, "stream", id="stream"),
        pytest.param({"sampling_params": []}, "sampling_params", id="no-object"),
        pytest.param({"sampling_params": {"n": 2}}, "n", id="several"),
        pytest.param({"sampling_params": {"logprobs": 5}}, "logprobs", id="alternatives"),
        pytest.param({"sampling_params": {"stop": "x"}}, "sampling_params.stop", id="stop-text"),
        pytest.param({"sampling_params": {"max_tokens": 0}}, "max_tokens", id="no-room"),
        pytest.param({"sampling_params": {"bad_words": ["x"]}}, "bad_words", id="bad-words"),
        pytest.param({"kv_transfer_params": {}}, "kv_transfer_params", id="denied"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedError) as refused:
        ask(**fields)
    assert (refused.value.kind, refused.value.field) == ("invalid", field)


def test_a_reply_is_the_tokens_with_their_logprobs(reply: Reply) -> None:
    found: Any = Generate().reply(ask(sampling_params={"logprobs": 0}), reply)
    [choice] = found["choices"]
    assert choice["token_ids"] == [5, 6, 7, 8]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == list(reply.logprobs)
    assert choice["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == 4
    assert Generate().reply(ask(request_id="r-1"), reply)["request_id"] == "r-1"


def test_without_room_the_finish_is_length(reply: Reply) -> None:
    found: Any = Generate().reply(ask(), replace(reply, finish="length"))
    assert found["choices"][0]["finish_reason"] == "length"
    assert found["choices"][0]["logprobs"] is None
