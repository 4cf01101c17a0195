"""Messages: what is asked, and what is said."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from treadle_gateway.conversation import (
    ArgumentsDelta,
    Ask,
    CallStarted,
    Event,
    Message,
    Reply,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
)
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.messages import Messages, counted
from treadle_gateway.wires.wire import Begun

HELLO: dict[str, Any] = {"role": "user", "content": "hi"}


def ask(**fields: Any) -> Ask:
    body = {"model": "policy", "max_tokens": 9, "messages": [HELLO], **fields}
    return Messages().ask(body, {})


def refused(**fields: Any) -> RefusedError:
    with pytest.raises(RefusedError) as found:
        ask(**fields)
    return found.value


def test_a_conversation_is_read_whole() -> None:
    found = ask(
        system=[
            {"type": "text", "text": "one"},
            {"type": "text", "text": "two", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "system", "content": "note", "output_config": {"effort": "medium"}},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "both"},
                    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1.0}},
                    {"type": "tool_use", "id": "toolu_2", "name": "g", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [{"type": "text", "text": "no"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
    )
    assert found.messages == (
        Message("system", (Text("one"), Text("two"))),
        Message("user", (Text("a"),)),
        Message("system", (Text("note"),)),
        Message(
            "assistant",
            (Text("both"),),
            reasoning="hm",
            calls=(ToolCall("toolu_1", "f", '{"a": 1.0}'), ToolCall("toolu_2", "g", "{}")),
        ),
        Message("tool", (Text("ok"),), call_id="toolu_1"),
        Message("tool", (Text("no"),), call_id="toolu_2", is_error=True),
        Message("user", (Text("go on"),)),
    )


def test_marks_of_the_cache_and_the_form_of_content_mean_nothing() -> None:
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert ask(messages=[{"role": "user", "content": [marked]}]).messages == ask().messages


def test_a_result_without_content_is_a_result() -> None:
    block = {"type": "tool_result", "tool_use_id": "toolu_1"}
    found = ask(messages=[{"role": "user", "content": [block]}])
    assert found.messages == (Message("tool", call_id="toolu_1"),)


def test_half_a_surrogate_pair_in_a_call_becomes_an_escape() -> None:
    block = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "\ud800"}}
    found = ask(messages=[{"role": "assistant", "content": [block]}])
    assert found.messages[0].calls[0].arguments == r'{"a": "\ud800"}'


def test_a_deferred_tool_is_there_once_a_search_found_it() -> None:
    tools: list[Any] = [
        {"name": "Bash", "input_schema": {"type": "object"}, "type": "custom"},
        {"name": "Fetch", "input_schema": {"type": "object"}, "defer_loading": True},
        {"name": "Other", "input_schema": {"type": "object"}, "defer_loading": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ]
    assert [tool.name for tool in ask(tools=tools).tools] == ["Bash"]
    reference = {"type": "tool_reference", "tool_name": "Fetch"}
    block = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [reference]}
    found = ask(tools=tools, messages=[{"role": "user", "content": [block]}])
    assert [tool.name for tool in found.tools] == ["Bash", "Fetch"]
    assert found.messages[0].text == '{"type": "tool_reference", "tool_name": "Fetch"}'
    assert found.ignored == ("tools.web_search_20250305",)


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        pytest.param({"type": "auto"}, ToolChoice(), id="auto"),
        pytest.param({"type": "any"}, ToolChoice("required"), id="any"),
        pytest.param({"type": "none"}, ToolChoice("none"), id="none"),
        pytest.param({"type": "tool", "name": "f"}, ToolChoice("required", ("f",)), id="named"),
        pytest.param(
            {"type": "auto", "disable_parallel_tool_use": True},
            ToolChoice(parallel=False),
            id="one-at-a-time",
        ),
    ],
)
def test_the_choice_of_a_tool_is_read(stated: dict[str, Any], expected: ToolChoice) -> None:
    found = ask(tools=[{"name": "f", "input_schema": {"type": "object"}}], tool_choice=stated)
    assert found.tools == (Tool("f", "", {"type": "object"}),)
    assert found.choice == expected


def test_what_the_large_client_sends_beside_is_tolerated() -> None:
    found = ask(
        max_tokens=128_000,
        thinking={"type": "enabled", "budget_tokens": 128_000, "display": "omitted"},
        output_config={"effort": "high"},
        context_management={"edits": []},
        metadata={"user_id": "{}"},
        temperature=1,
        stop_sequences=["END"],
    )
    assert found.reasoning
    assert found.max_tokens == 128_000
    assert found.wanted.stop == ("END",)
    assert found.ignored == ("context_management", "metadata")
    assert not ask(thinking={"type": "disabled"}).reasoning


def test_a_schema_is_read_under_both_names() -> None:
    stated = {"type": "json_schema", "schema": {"type": "object"}}
    assert ask(output_config={"format": stated}).wanted.schema == {"type": "object"}
    assert ask(output_format=stated).wanted.schema == {"type": "object"}


def test_a_thread_is_refused_so_that_the_client_sends_the_history() -> None:
    error = refused(thread={"type": "create"})
    status, _, body = Messages().refusal(error)
    said: Any = body["error"]
    assert (status, said["type"]) == (400, "invalid_request_error")
    assert said["details"] == {"error_code": "thread_unsupported_request"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"messages": []}, "messages", id="no-messages"),
        pytest.param({"messages": [{"role": "tool"}]}, "messages.0.role", id="role"),
        pytest.param({"messages": [{"role": "user"}]}, "messages.0.content", id="no-content"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="no-room"),
        pytest.param({"tool_choice": "auto"}, "tool_choice", id="choice-in-a-word"),
        pytest.param({"tool_choice": {"type": "x"}}, "tool_choice.type", id="unknown-choice"),
        pytest.param({"system": 5}, "system", id="system-no-text"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
            "messages.0.content.0.type",
            id="unknown-block",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content.0.tool_use_id",
            id="result-of-nothing",
        ),
        pytest.param(
            {"tools": [{"name": [], "defer_loading": True}, {"name": {}}]},
            "tools.1.name",
            id="name-no-text",
        ),
        pytest.param({"mm_processor_kwargs": {}}, "mm_processor_kwargs", id="denied"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    error = refused(**fields)
    assert (error.kind, error.field) == ("invalid", field)


def test_a_reply_says_all(reply: Reply) -> None:
    found = Messages().reply(ask(), reply)
    assert found["id"] == f"msg_{reply.id}"
    content: Any = found["content"]
    assert content[0]["thinking"] == "T-think"
    assert content[0]["signature"]
    assert content[1] == {"type": "text", "text": "About to call."}
    assert [block["input"] for block in content[2:]] == [{"city": "x"}, {"city": "\u2028é"}]
    assert found["usage"] == {
        "input_tokens": 40,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 60,
        "output_tokens": 4,
        "service_tier": "standard",
    }


@pytest.mark.parametrize("arguments", ["{ bad", "[1]", '"text"', "[" * 100_000])
def test_arguments_that_are_no_object_are_shown_as_they_were_said(
    reply: Reply, arguments: str
) -> None:
    call = ToolCall("toolu_1", "f", arguments)
    content: Any = Messages().reply(
        ask(), replace(reply, message=Message("assistant", calls=(call,)))
    )["content"]
    assert content[0]["input"]["__unparsedToolInput"]["raw"] == arguments


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"finish": "stop"}, ("end_turn", None), id="stopped"),
        pytest.param({"finish": "stop", "stop": "END"}, ("stop_sequence", "END"), id="stop-text"),
        pytest.param({"finish": "length"}, ("max_tokens", None), id="no-room"),
        pytest.param({"finish": "calls"}, ("tool_use", None), id="calls"),
    ],
)
def test_why_a_reply_ended_is_said_alike_in_both_forms(
    reply: Reply,
    fields: dict[str, Any],
    expected: tuple[str, str | None],
    play: Callable[..., bytes],
    read: Callable[..., Any],
) -> None:
    ended = replace(reply, **fields)
    whole = Messages().reply(ask(), ended)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    stream = dict(read(play(Messages(), ask(), ended, [])))
    delta = stream["message_delta"]["delta"]
    assert (delta["stop_reason"], delta["stop_sequence"]) == expected


def test_a_stream_opens_and_closes_every_block(
    reply: Reply, events: list[Event], play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    found = read(play(Messages(), ask(), reply, events))
    assert all(name == data["type"] for name, data in found)
    short = [name.removeprefix("content_block_") for name, _ in found]
    assert short == [
        "message_start",
        *("start", "delta", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
        "message_delta",
        "message_stop",
    ]
    assert [d["index"] for n, d in found if n == "content_block_start"] == [0, 1, 2, 3]
    assert found[0][1]["message"]["usage"]["input_tokens"] == 40
    assert found[-2][1]["usage"] == Messages().reply(ask(), reply)["usage"]


def test_a_call_that_was_cut_off_is_closed_at_the_end(
    reply: Reply, play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    cut = [CallStarted("toolu_1", "f"), ArgumentsDelta('{"a')]
    names = [name for name, _ in read(play(Messages(), ask(), reply, cut))]
    assert names.count("content_block_start") == names.count("content_block_stop") == 1


def test_a_call_behind_an_open_call_is_a_block_of_its_own(
    reply: Reply, play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    calls = [CallStarted("toolu_1", "f"), CallStarted("toolu_2", "g")]
    found = read(play(Messages(), ask(), reply, calls))
    begun = [data["content_block"]["id"] for name, data in found if name == "content_block_start"]
    assert begun == ["toolu_1", "toolu_2"]


def test_a_stream_is_the_same_bytes_again(
    reply: Reply, events: list[Event], play: Callable[..., bytes]
) -> None:
    assert play(Messages(), ask(), reply, events) == play(Messages(), ask(), reply, events)


def test_a_failure_is_no_clean_end(read: Callable[..., Any]) -> None:
    stream = Messages().stream(ask(), Begun("0", 1, 1, 0))
    [(name, data)] = read(stream.failed(RefusedError("busy", "full")))
    assert name == "error"
    assert data["error"] == {"type": "rate_limit_error", "message": "full"}
    assert read(stream.ping()) == [("ping", {"type": "ping"})]


def test_tokens_are_counted_for_a_request_without_a_limit() -> None:
    assert Messages().ask({"model": "policy", "messages": [HELLO]}, {}).max_tokens is None
    assert counted(7) == {"input_tokens": 7}
