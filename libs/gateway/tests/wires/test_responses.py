"""Responses: what is asked, and what is said."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from treadle_gateway.conversation import (
    ArgumentsDelta,
    Ask,
    CallEnded,
    CallStarted,
    Event,
    Message,
    Reply,
    Text,
    TextDelta,
    Tool,
    ToolCall,
    ToolChoice,
    Usage,
)
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.responses import Responses
from treadle_gateway.wires.wire import Begun

FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "f",
    "description": "d",
    "strict": False,
    "parameters": {"type": "object"},
}


def ask(**fields: Any) -> Ask:
    return Responses().ask({"model": "policy", "input": "hi", **fields}, {})


def refused(**fields: Any) -> RefusedError:
    with pytest.raises(RefusedError) as found:
        ask(**fields)
    return found.value


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "output_text", "text": text}], **fields}


def think(text: str, **fields: Any) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}]
    return {"type": "reasoning", "summary": summary, "content": None, **fields}


def call(call_id: str, arguments: str = "{}", **fields: Any) -> dict[str, Any]:
    return {
        "type": "function_call",
        "call_id": call_id,
        "name": "f",
        "arguments": arguments,
        **fields,
    }


def test_a_string_is_what_the_user_says() -> None:
    assert ask(instructions="Be brief.").messages == (
        Message("system", (Text("Be brief."),)),
        Message("user", (Text("hi"),)),
    )


def test_items_of_one_reply_are_one_message() -> None:
    found = ask(
        input=[
            {
                "type": "message",
                "id": "msg_own",
                "role": "developer",
                "content": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                ],
                "internal_chat_message_metadata_passthrough": {"turn_id": "t"},
            },
            {"role": "user", "content": "go"},
            think("hm", encrypted_content="x"),
            say("both", type="message", status="completed"),
            call("call_1", '{ "odd":1.0}', id="fc_1", status="completed"),
            call("call_2", "{ bad", namespace="agents"),
            {"type": "function_call_output", "call_id": "call_1", "output": "ok"},
            {
                "type": "function_call_output",
                "id": "fco_own",
                "call_id": "call_2",
                "output": [{"type": "input_text", "text": "no"}],
            },
            say("done"),
        ]
    )
    assert found.messages == (
        Message("system", (Text("a"), Text("b"))),
        Message("user", (Text("go"),)),
        Message(
            "assistant",
            (Text("both"),),
            reasoning="hm",
            calls=(
                ToolCall("call_1", "f", '{ "odd":1.0}'),
                ToolCall("call_2", "f", "{ bad", "agents"),
            ),
        ),
        Message("tool", (Text("ok"),), call_id="call_1"),
        Message("tool", (Text("no"),), call_id="call_2"),
        Message("assistant", (Text("done"),)),
    )


def test_two_replies_in_a_row_are_told_apart_by_our_ids() -> None:
    first, second = "a" * 32, "b" * 32
    items = [
        say("par", id=f"msg_{first}0000"),
        think("hm", id=f"rs_{second}0000"),
        say("whole", id=f"msg_{second}0001"),
        call("call_1", id=f"fc_{second}0002"),
        say("more", id=f"msg_{second}0003"),
    ]
    assert [(m.text, m.reasoning, len(m.calls)) for m in ask(input=items).messages] == [
        ("par", "", 0),
        ("wholemore", "hm", 1),
    ]


def test_a_thought_opens_a_reply_where_ids_are_gone() -> None:
    items = [say("one"), think("hm"), say("two")]
    assert [(m.text, m.reasoning) for m in ask(input=items).messages] == [
        ("one", ""),
        ("two", "hm"),
    ]


def test_a_thought_that_comes_back_as_text_is_a_thought() -> None:
    items = [say("<think>\nhm\n</think>"), call("call_1")]
    [message] = ask(input=items).messages
    assert (message.reasoning, message.parts, len(message.calls)) == ("hm", (), 1)
    both = say("<think>a</think>b")
    assert ask(input=[both]).messages[0].text == "<think>a</think>b"


@pytest.mark.parametrize(
    "item",
    [
        pytest.param({"role": "assistant", "content": None}, id="null"),
        pytest.param({"role": "assistant", "content": ""}, id="empty"),
        pytest.param({"role": "assistant"}, id="absent"),
        pytest.param({"type": "reasoning", "summary": []}, id="no-thought"),
    ],
)
def test_items_that_say_nothing_are_no_message(item: dict[str, Any]) -> None:
    found = ask(input=[{"role": "user", "content": "hi"}, item, {"role": "user", "content": "yo"}])
    assert [message.role for message in found.messages if message.text] == ["user", "user"]
    assert not any(message.calls or message.reasoning for message in found.messages)


def test_tools_of_all_kinds_are_read() -> None:
    found = ask(
        tools=[
            FUNCTION,
            {"type": "namespace", "name": "agents", "tools": [FUNCTION]},
            {"type": "custom", "name": "patch", "description": "p", "format": {"type": "text"}},
            {"type": "web_search", "external_web_access": True},
        ],
        tool_choice={"type": "function", "name": "f"},
    )
    assert found.tools[:2] == (
        Tool("f", "d", {"type": "object"}),
        Tool("f", "d", {"type": "object"}, "agents"),
    )
    assert found.tools[2].name == "patch"
    assert "input" in str(found.tools[2].parameters)
    assert found.choice == ToolChoice("required", ("f",))
    assert found.ignored == ("tools.web_search",)


@pytest.mark.parametrize(
    "stated",
    [
        pytest.param("required", id="any"),
        pytest.param({"type": "function", "name": "f"}, id="named"),
        pytest.param(
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            id="some",
        ),
    ],
)
def test_the_choice_is_shown_as_it_was_stated(stated: Any) -> None:
    reply = Reply("0", 0, Message("assistant"), "stop", Usage(1, 0, 1))
    asked = ask(tools=[FUNCTION], tool_choice=stated)
    assert Responses().reply(asked, reply)["tool_choice"] == stated


def test_fields_beside_are_read_or_tolerated() -> None:
    found = ask(
        max_output_tokens=10**12,
        reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        store=False,
        include=[],
        prompt_cache_key="k",
        client_metadata={"b": 1},
        parallel_tool_calls=False,
        temperature=0.5,
    )
    assert found.max_tokens == 2**31 - 1
    assert not found.reasoning
    assert found.wanted.schema == {"type": "object"}
    assert found.wanted.temperature == 0.5
    assert not found.choice.parallel
    assert found.ignored == ("client_metadata", "include", "prompt_cache_key", "store")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        pytest.param({"previous_response_id": "resp_1"}, "previous_response_id", id="previous"),
        pytest.param({"conversation": "conv_1"}, "conversation", id="conversation"),
        pytest.param({"prompt": {"id": "p"}}, "prompt", id="prompt"),
        pytest.param({"background": True}, "background", id="background"),
        pytest.param({"input": [{"type": "compaction_trigger"}]}, "input.0", id="compaction"),
        pytest.param({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", id="reference"),
        pytest.param({"input": [{"type": "mystery"}]}, "input.0.type", id="unknown-item"),
        pytest.param({"input": [{}]}, "input.0.type", id="no-item"),
        pytest.param({"input": [{"type": ["message"]}]}, "input.0.type", id="type-no-text"),
        pytest.param({"input": []}, "input", id="no-input"),
        pytest.param({"input": 5}, "input", id="input-no-array"),
        pytest.param({"input": [{"role": "boss"}]}, "input.0.role", id="role"),
        pytest.param({"input": [call("")]}, "input.0.call_id", id="call-without-id"),
        pytest.param({"tool_choice": {"type": "web_search"}}, "tool_choice.type", id="hosted"),
        pytest.param({"text": {"format": {"type": "xml"}}}, "text.format.type", id="format"),
        pytest.param({"n": 2, "lora_path": "/x"}, "lora_path", id="denied"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    error = refused(**fields)
    assert (error.kind, error.field) == ("invalid", field)


def test_a_reply_says_all(reply: Reply) -> None:
    found = Responses().reply(ask(), reply)
    output: Any = found["output"]
    assert found["id"] == f"resp_{reply.id}"
    assert found["status"] == "completed"
    assert [item["type"] for item in output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert len({item["id"] for item in output}) == 4
    assert output[0]["summary"][0]["text"] == "T-think"
    assert [item["call_id"] for item in output[2:]] == ["call_1", "call_2"]
    usage: Any = found["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (100, 4, 104)


def test_a_reply_comes_back_as_the_message_that_it_was(reply: Reply) -> None:
    output: Any = Responses().reply(ask(), reply)["output"]
    assert ask(input=output).messages == (reply.message,)


def test_a_stream_ends_with_the_reply_as_it_would_have_been_whole(
    reply: Reply, events: list[Event], play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    found = read(play(Responses(), ask(), reply, events))
    assert all(name == data["type"] for name, data in found)
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert found[-1][0] == "response.completed"
    assert found[-1][1]["response"] == Responses().reply(ask(), reply)
    done = [data["item"] for name, data in found if name == "response.output_item.done"]
    assert done == found[-1][1]["response"]["output"]


def test_a_stream_opens_and_closes_every_item(
    reply: Reply, events: list[Event], play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    names = [
        name.removeprefix("response.") for name, _ in read(play(Responses(), ask(), reply, events))
    ]
    call_events = ["function_call_arguments.done", "output_item.done"]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *["output_item.added", *["function_call_arguments.delta"] * 2, *call_events],
        *["output_item.added", "function_call_arguments.delta", *call_events],
        "completed",
    ]


def test_a_custom_tool_gets_its_text_and_no_json(
    reply: Reply, play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    asked = ask(tools=[{"type": "custom", "name": "patch"}])
    arguments = '{"input": "*** Begin"}'
    events = [CallStarted("call_1", "patch"), ArgumentsDelta(arguments[:9])]
    events += [ArgumentsDelta(arguments[9:]), CallEnded()]
    said = replace(
        reply, message=Message("assistant", calls=(ToolCall("call_1", "patch", arguments),))
    )
    found = read(play(Responses(), asked, said, events))
    [item] = found[-1][1]["response"]["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** Begin")
    assert found[-1][1]["response"] == Responses().reply(asked, said)
    back = ask(input=[item, {**item, "type": "custom_tool_call_output", "output": "ok"}])
    assert back.messages == (said.message, Message("tool", (Text("ok"),), call_id="call_1"))


def test_a_call_in_a_namespace_names_it(
    reply: Reply, play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    spoken = [CallStarted("call_1", "f", "agents"), ArgumentsDelta("{}"), CallEnded()]
    found = read(play(Responses(), ask(), reply, spoken))
    assert found[-1][1]["response"]["output"][0]["namespace"] == "agents"


def test_a_reply_without_room_is_incomplete(
    reply: Reply, play: Callable[..., bytes], read: Callable[..., Any]
) -> None:
    cut = replace(reply, message=Message("assistant", (Text("par"),)), finish="length")
    found = read(play(Responses(), ask(), cut, [TextDelta("par")]))
    assert found[-1][0] == "response.incomplete"
    assert found[-1][1]["response"] == Responses().reply(ask(), cut)
    assert found[-1][1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found[-1][1]["response"]["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(RefusedError("busy", "full"), "rate_limit_exceeded", id="full"),
        pytest.param(RefusedError("unavailable", "gone"), "server_error", id="gone"),
        pytest.param(RefusedError("invalid", "no", code="odd"), "server_error", id="other"),
    ],
)
def test_a_failure_is_a_failed_response(
    error: RefusedError, code: str, read: Callable[..., Any]
) -> None:
    stream = Responses().stream(ask(), Begun("0", 1, 1, 0))
    begun = stream.start() + stream.event(TextDelta("a")) + stream.ping()
    name, data = read(begun + stream.failed(error))[-1]
    assert name == "response.failed"
    assert data["response"]["error"] == {"code": code, "message": error.message}
    assert data["response"]["status"] == "failed"


def test_a_stream_is_the_same_bytes_again(
    reply: Reply, events: list[Event], play: Callable[..., bytes]
) -> None:
    assert play(Responses(), ask(), reply, events) == play(Responses(), ask(), reply, events)
