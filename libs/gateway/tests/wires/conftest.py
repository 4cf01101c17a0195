"""What the tests of the wires share: one conversation with everything in it."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from treadle_gateway.conversation import (
    ArgumentsDelta,
    Ask,
    CallEnded,
    CallStarted,
    Event,
    Message,
    ReasoningDelta,
    Reply,
    Text,
    TextDelta,
    ToolCall,
    Usage,
)
from treadle_gateway.wires.wire import Begun, Wire

REPLY_ID = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def reply() -> Reply:
    """A thought, words and two calls, the second with a line separator of Unicode in it."""
    return Reply(
        id=REPLY_ID,
        created=1_796_025_383,
        message=Message(
            "assistant",
            (Text("About to call."),),
            reasoning="T-think",
            calls=(
                ToolCall("call_1", "get_weather", '{"city": "x"}'),
                ToolCall("call_2", "get_weather", '{"city":"\u2028é"}'),
            ),
        ),
        finish="calls",
        usage=Usage(prompt=100, cached=60, sampled=4, reasoning=2),
        token_ids=(5, 6, 7, 8),
        logprobs=(-0.5, -0.25, -1.0, 0.0),
    )


@pytest.fixture
def events() -> list[Event]:
    """The same, as it was sampled."""
    return [
        ReasoningDelta("T-"),
        ReasoningDelta("think"),
        TextDelta("About to "),
        TextDelta("call."),
        CallStarted("call_1", "get_weather"),
        ArgumentsDelta('{"cit'),
        ArgumentsDelta('y": "x"}'),
        CallEnded(),
        CallStarted("call_2", "get_weather"),
        ArgumentsDelta('{"city":"\u2028é"}'),
        CallEnded(),
    ]


@pytest.fixture
def play() -> Callable[[Wire, Ask, Reply, Iterable[Event]], bytes]:
    """All bytes of one stream."""

    def played(wire: Wire, ask: Ask, reply: Reply, events: Iterable[Event]) -> bytes:
        begun = Begun(reply.id, reply.created, reply.usage.prompt, reply.usage.cached)
        stream = wire.stream(ask, begun)
        said = [stream.start()]
        said += [stream.event(event) for event in events]
        return b"".join([*said, stream.end(reply)])

    return played


@pytest.fixture
def read() -> Callable[[bytes], list[tuple[str, Any]]]:
    """Name and data of every event of a stream; a name is empty where there is none."""

    def found(stream: bytes) -> list[tuple[str, Any]]:
        events: list[tuple[str, Any]] = []
        for block in stream.decode("ascii").split("\n\n"):
            lines = [line for line in block.split("\n") if not line.startswith(":")]
            fields = dict(line.split(": ", 1) for line in lines if line)
            if "data" in fields:
                data = fields["data"]
                said = data if data == "[DONE]" else json.loads(data)
                events.append((fields.get("event", ""), said))
        return events

    return found
