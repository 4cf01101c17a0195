"""Chat Completions: what is asked, and what is said."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from treadle_gateway.conversation import (
    Ask,
    Event,
    Message,
    Reply,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    Wanted,
)
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.wire import Begun

HELLO: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
}


def ask(**fields: Any) -> Ask:
    return Chat().ask({"model": "policy", "messages": [HELLO], **fields}, {})


def refused(**fields: Any) -> RefusedError:
    with pytest.raises(RefusedError) as found:
        ask(**fields)
    return found.value


def test_a_conversation_is_read_whole() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{ bad"}}
    found = ask(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "ok"}]},
            {"role": "system", "content": "A note in the middle."},
            {"role": "assistant", "content": "A last word."},
        ]
    )
    assert found.messages == (
        Message("system", (Text("Be brief."),)),
        Message("user", (Text("a"), Text("b"))),
        Message("assistant", reasoning="hm", calls=(ToolCall("call_1", "f", "{ bad"),)),
        Message("tool", (Text("ok"),), call_id="call_1"),
        Message("system", (Text("A note in the middle."),)),
        Message("assistant", (Text("A last word."),)),
    )


@pytest.mark.parametrize(
    "message",
    [
        pytest.param({"content": None}, id="null"),
        pytest.param({"content": ""}, id="empty"),
        pytest.param({}, id="absent"),
        pytest.param({"content": []}, id="no-parts"),
        pytest.param({"content": [{"type": "text", "text": ""}]}, id="empty-part"),
    ],
)
def test_content_that_says_nothing_is_always_the_same(message: dict[str, Any]) -> None:
    assert ask(messages=[{"role": "assistant", **message}]).messages == (Message("assistant"),)


def test_tools_and_their_choice_are_read() -> None:
    found = ask(
        tools=[TOOL, {"type": "web_search"}],
        tool_choice={"type": "function", "function": {"name": "f"}},
        parallel_tool_calls=False,
    )
    assert found.tools == (Tool("f", "d", {"type": "object"}),)
    assert found.choice == ToolChoice("required", ("f",), parallel=False)
    assert found.ignored == ("tools.web_search",)


@pytest.mark.parametrize("mode", ["auto", "none", "required"])
def test_a_choice_in_one_word_is_read(mode: str) -> None:
    assert ask(tools=[TOOL], tool_choice=mode).choice.mode == mode


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_a_choice_among_some_of_the_tools_is_read() -> None:
    found = ask(tools=[TOOL], tool_choice=allowed("required", "f"))
    assert found.choice == ToolChoice("required", ("f",))
    assert found.ignored == ()


def test_wishes_that_nothing_enforces_are_named() -> None:
    found = ask(tools=[TOOL], tool_choice=allowed("auto", "f"), parallel_tool_calls=False)
    assert found.choice == ToolChoice("auto", ("f",), parallel=False)
    assert found.ignored == ("parallel_tool_calls", "allowed_tools")
    assert ask(parallel_tool_calls=False).ignored == ()


def test_sampling_is_read_and_never_dropped() -> None:
    stated: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"50256": -100},
        "stop": ["a", "b", "a"],
    }
    assert ask(**stated).wanted == Wanted(
        **(stated | {"logit_bias": {50256: -100.0}, "stop": ("a", "b")})
    )
    assert ask().wanted == Wanted()


def test_a_schema_is_read_in_every_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    stated = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    assert ask(response_format=stated).wanted.schema == schema
    assert ask(response_format={"type": "json_object"}).wanted.schema == {}
    assert ask(response_format={"type": "text"}).wanted.schema is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"max_tokens": 5}, 5, id="old-name"),
        pytest.param({"max_completion_tokens": 6, "max_tokens": 5}, 6, id="both-names"),
        pytest.param({"max_tokens": 10**12}, 2**31 - 1, id="clamped"),
        pytest.param({"max_tokens": None}, None, id="null"),
    ],
)
def test_the_most_tokens_are_clamped(fields: dict[str, Any], expected: int | None) -> None:
    assert ask(**fields).max_tokens == expected


@pytest.mark.parametrize("value", [0, -1, 1.5, 1.0, "9", True])
def test_a_bad_number_of_tokens_is_refused_by_name(value: object) -> None:
    error = refused(max_completion_tokens=value)
    assert (error.kind, error.field) == ("invalid", "max_completion_tokens")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"n": 2}, "n", id="several-replies"),
        pytest.param({"n": 10**9}, "n", id="very-many-replies"),
        pytest.param({"n": 0}, "n", id="no-replies"),
        pytest.param({"model": 3}, "model", id="model-no-text"),
        pytest.param({"model": None}, "model", id="no-model"),
        pytest.param({"messages": []}, "messages", id="no-messages"),
        pytest.param({"messages": "hi"}, "messages", id="messages-no-array"),
        pytest.param({"messages": ["hi"]}, "messages.0", id="message-no-object"),
        pytest.param({"messages": [{"role": "boss", "content": ""}]}, "messages.0.role", id="role"),
        pytest.param({"messages": [{"role": ["user"]}]}, "messages.0.role", id="role-no-text"),
        pytest.param(
            {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", id="five"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages.0.content.0.type",
            id="unknown-part",
        ),
        pytest.param(
            {"messages": [{"role": "tool", "tool_call_id": 5}]},
            "messages.0.tool_call_id",
            id="call-no-text",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages.0.tool_calls.0.id",
            id="call-without-id",
        ),
        pytest.param({"temperature": -0.1}, "temperature", id="temperature-below-zero"),
        pytest.param({"temperature": "hot"}, "temperature", id="temperature-no-number"),
        pytest.param({"top_p": 0}, "top_p", id="top-p-of-nothing"),
        pytest.param({"stop": [""]}, "stop", id="empty-stop"),
        pytest.param({"stop": ["a"] * 17}, "stop", id="too-many-stops"),
        pytest.param({"stop": [1]}, "stop", id="stop-no-text"),
        pytest.param({"seed": 2**64}, "seed", id="seed-too-large"),
        pytest.param({"logit_bias": {"x": 1}}, "logit_bias", id="bias-of-no-token"),
        pytest.param({"logit_bias": {"1": 1000}}, "logit_bias.1", id="bias-too-large"),
        pytest.param({"stream": "yes"}, "stream", id="stream-no-flag"),
        pytest.param({"tools": [{"type": "function"}]}, "tools.0.function", id="tool-of-nothing"),
        pytest.param({"tools": [TOOL, TOOL]}, "tools.1.function.name", id="tool-twice"),
        pytest.param({"tools": [TOOL], "tool_choice": "some"}, "tool_choice", id="unknown-choice"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="nothing-to-choose"),
        pytest.param(
            {"tools": [TOOL], "tool_choice": allowed("auto", "g")},
            "tool_choice",
            id="unknown-among-some",
        ),
        pytest.param(
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            id="unknown-tool",
        ),
        pytest.param({"response_format": {"type": "xml"}}, "response_format.type", id="format"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    error = refused(**fields)
    assert (error.kind, error.field) == ("invalid", field)
    assert field in error.message or "n must be 1" in error.message


@pytest.mark.parametrize(
    "name",
    [
        "chat_template",
        "chat_template_kwargs",
        "mm_processor_kwargs",
        "prompt_embeds",
        "vllm_xargs",
        "lora_path",
        "guided_regex",
        "structured_outputs",
        "use_beam_search",
        "functions",
    ],
)
def test_what_reaches_into_the_engine_is_refused_by_name(name: str) -> None:
    error = refused(**{name: {"x": 1}})
    assert (error.kind, error.field, error.code) == ("invalid", name, "unsupported_parameter")
    assert ask(**{name: None}).ignored == ()


def test_other_unknown_fields_are_tolerated_and_named() -> None:
    found = ask(user="u", metadata={"a": "b"}, zebra=1, top_logprobs=2, nothing=None)
    assert found.ignored == ("metadata", "top_logprobs", "user", "zebra")


def test_a_client_may_ask_for_no_thoughts() -> None:
    assert ask().reasoning
    assert not ask(reasoning_effort="none").reasoning
    assert not ask(enable_thinking=False).reasoning
    assert ask(reasoning_effort="low").reasoning


def test_a_reply_says_all(reply: Reply) -> None:
    found = Chat().reply(ask(), reply)
    assert found["id"] == f"chatcmpl-{reply.id}"
    choice: Any = found["choices"]
    assert choice[0]["message"] == {
        "role": "assistant",
        "content": "About to call.",
        "reasoning_content": "T-think",
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.message.calls
        ],
    }
    assert choice[0]["logprobs"] is None
    assert found["usage"] == {
        "prompt_tokens": 100,
        "completion_tokens": 4,
        "total_tokens": 104,
        "prompt_tokens_details": {"cached_tokens": 60},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_an_empty_reply_has_empty_content(reply: Reply) -> None:
    silent = replace(reply, message=Message("assistant"), finish="stop")
    choices: Any = Chat().reply(ask(), silent)["choices"]
    assert choices[0]["message"] == {"role": "assistant", "content": ""}
    calls = replace(reply, message=replace(reply.message, parts=()))
    choices = Chat().reply(ask(), calls)["choices"]
    assert choices[0]["message"]["content"] is None


def test_every_sampled_token_has_its_logprob(reply: Reply) -> None:
    choices: Any = Chat().reply(ask(logprobs=True), reply)["choices"]
    entries = choices[0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [
        "token_id:5",
        "token_id:6",
        "token_id:7",
        "token_id:8",
    ]
    assert [entry["logprob"] for entry in entries] == [-0.5, -0.25, -1.0, 0.0]


def test_a_stream_says_all_in_order(
    reply: Reply, events: list[Event], play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    found = [data for _, data in read(play(Chat(), ask(), reply, events))]
    deltas = [chunk["choices"][0]["delta"] for chunk in found[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1:5] == [
        {"reasoning_content": "T-"},
        {"reasoning_content": "think"},
        {"content": "About to "},
        {"content": "call."},
    ]
    calls = [delta["tool_calls"][0] for delta in deltas[5:-1]]
    assert [call["index"] for call in calls] == [0, 0, 0, 1, 1]
    assert calls[0]["id"] == "call_1"
    assert "".join(c["function"]["arguments"] for c in calls[3:]) == '{"city":"\u2028é"}'
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert found[-1] == "[DONE]"
    assert {chunk["id"] for chunk in found[:-1]} == {f"chatcmpl-{reply.id}"}


def test_usage_comes_in_a_stream_only_when_it_was_asked_for(
    reply: Reply, play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    asked = ask(stream=True, stream_options={"include_usage": True})
    found = [data for _, data in read(play(Chat(), asked, reply, []))]
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["total_tokens"] == 104
    without = [data for _, data in read(play(Chat(), ask(stream=True), reply, []))]
    assert not any("usage" in chunk for chunk in without[:-1])


def test_logprobs_come_in_a_stream_once_for_every_token(
    reply: Reply, events: list[Event], play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    found = [data for _, data in read(play(Chat(), ask(logprobs=True), reply, events))]
    stated = [chunk["choices"][0]["logprobs"] for chunk in found[:-1]]
    assert [len(entry["content"]) for entry in stated if entry] == [4]


def test_a_stream_is_the_same_bytes_again(
    reply: Reply, events: list[Event], play: Callable[..., bytes]
) -> None:
    assert play(Chat(), ask(), reply, events) == play(Chat(), ask(), reply, events)


def test_a_failure_is_no_clean_end(read: Callable[..., Any]) -> None:
    stream = Chat().stream(ask(), Begun("0", 1, 1, 0))
    failed = stream.failed(RefusedError("unavailable", "gone"))
    [(_, data)] = read(failed)
    assert data["error"]["message"] == "gone"
    assert b"[DONE]" not in failed
    assert stream.ping() == b": ping\n\n"
