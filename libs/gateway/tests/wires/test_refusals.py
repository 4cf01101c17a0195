"""Errors in the shapes and words of the wires."""

from typing import Any, get_args

import pytest

from treadle_gateway.errors import RefusalKind, RefusedError
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.generate import Generate
from treadle_gateway.wires.messages import Messages
from treadle_gateway.wires.models import check_model, models
from treadle_gateway.wires.refusals import STATUS
from treadle_gateway.wires.responses import Responses

WIRES = [Chat(), Responses(), Messages(), Generate()]


def test_every_kind_has_a_status() -> None:
    assert set(STATUS) == set(get_args(RefusalKind))


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
@pytest.mark.parametrize("kind", get_args(RefusalKind))
def test_every_wire_can_say_every_refusal(wire: Any, kind: RefusalKind) -> None:
    status, headers, body = wire.refusal(RefusedError(kind, "why", tokens=10, limit=9))
    assert status == STATUS[kind]
    assert headers == {}
    assert body["error"]["message"]
    assert body["error"]["type"]


@pytest.mark.parametrize("wire", [Chat(), Responses(), Generate()], ids=lambda wire: wire.name)
def test_the_shape_of_openai(wire: Any) -> None:
    body = wire.refusal(RefusedError("invalid", "n must be 1", field="n"))[2]
    assert body == {
        "error": {
            "message": "n must be 1",
            "type": "invalid_request_error",
            "param": "n",
            "code": None,
        }
    }


def test_the_shape_of_anthropic() -> None:
    body = Messages().refusal(RefusedError("invalid", "no"))[2]
    assert body == {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}


def test_an_overflow_is_said_in_the_words_that_clients_parse() -> None:
    error = RefusedError("overflow", "", tokens=9000, limit=8192)
    said: Any = Chat().refusal(error)[2]["error"]
    assert said["code"] == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in said["message"]
    assert "resulted in 9000 tokens" in said["message"]
    said = Messages().refusal(error)[2]["error"]
    assert said["message"] == "prompt is too long: 9000 tokens > 8191 maximum"


@pytest.mark.parametrize(
    ("seconds", "headers"),
    [
        pytest.param(0.0, {}, id="never"),
        pytest.param(0.25, {"Retry-After": "1", "retry-after-ms": "250"}, id="soon"),
        pytest.param(2.5, {"Retry-After": "3", "retry-after-ms": "2500"}, id="later"),
    ],
)
def test_when_to_come_again_is_a_header(seconds: float, headers: dict[str, str]) -> None:
    error = RefusedError("busy", "full", retry_after_s=seconds)
    assert all(wire.refusal(error)[1] == headers for wire in WIRES)


def test_another_model_is_never_given_silently() -> None:
    check_model("policy", "policy")
    with pytest.raises(RefusedError) as refused:
        check_model("gpt-5", "policy")
    said: Any = Chat().refusal(refused.value)[2]["error"]
    assert said["code"] == "model_not_found"


def test_the_list_of_models_is_one_for_all_clients() -> None:
    found: Any = models("policy", created=1_700_000_000, max_context=8192)
    assert found["object"] == "list"
    assert found["first_id"] == found["last_id"] == found["data"][0]["id"] == "policy"
    assert found["data"][0]["created_at"] == "2023-11-14T22:13:20Z"
    assert found["data"][0]["max_model_len"] == 8192
