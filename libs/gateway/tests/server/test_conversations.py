"""A conversation of two turns with a tool, over each wire: what came is what was sampled."""

import json
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from treadle_gateway.terms import Access
from treadle_gateway.testing import MODEL, World

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "number"}}}
CALL = """Let me look.
<tool_call>
{"name": "weather", "arguments": {"days": 1.0,  "city": "\\u00c5s"}}
</tool_call>"""


def says(prompt: str) -> str:
    return "It is 21 degrees." if "tool_response" in prompt else CALL


class Client(Protocol):
    """What an agent does over one wire."""

    path: str

    def first(self) -> dict[str, Any]:
        """Body of the first request."""
        ...

    def second(self, reply: Any) -> dict[str, Any]:
        """Body of the next: the history, rewritten as clients do, and the result of the tool."""
        ...

    def whole(self, events: list[Any]) -> Any:
        """The reply that a stream makes."""
        ...

    def text(self, reply: Any) -> str: ...


class ChatClient:
    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.said: list[Any] = [{"role": "user", "content": "Weather?"}]

    def first(self) -> dict[str, Any]:
        function = {"name": "weather", "parameters": SCHEMA}
        return {
            "model": MODEL,
            "messages": self.said,
            "tools": [{"type": "function", "function": function}],
        }

    def second(self, reply: Any) -> dict[str, Any]:
        message = reply["choices"][0]["message"]
        (call,) = message["tool_calls"]
        arguments = json.dumps(dict(reversed(json.loads(call["function"]["arguments"]).items())))
        echoed = call | {"function": {"name": "weather", "arguments": arguments}}
        self.said += [
            {"role": "assistant", "content": message["content"], "tool_calls": [echoed]},
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": [{"type": "text", "text": "21"}],
            },
        ]
        return self.first()

    def whole(self, events: list[Any]) -> Any:
        text, calls = "", {}
        for event in events:
            delta = event["choices"][0]["delta"]
            text += delta.get("content") or ""
            for part in delta.get("tool_calls", []):
                call = calls.setdefault(part["index"], {"function": {"arguments": ""}} | part)
                if call is not part and "id" not in part:
                    call["function"]["arguments"] += part["function"]["arguments"]
        message = {"role": "assistant", "content": text, "tool_calls": list(calls.values())}
        return {"choices": [{"message": message}]}

    def text(self, reply: Any) -> str:
        return reply["choices"][0]["message"]["content"]


class ResponsesClient:
    path = "/v1/responses"

    def __init__(self) -> None:
        self.said: list[Any] = [{"role": "user", "content": "Weather?"}]

    def first(self) -> dict[str, Any]:
        tool = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
        return {"model": MODEL, "input": self.said, "tools": [tool]}

    def second(self, reply: Any) -> dict[str, Any]:
        (call,) = [item for item in reply["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "21"}
        self.said += [*reply["output"], result]
        return self.first()

    def whole(self, events: list[Any]) -> Any:
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["type"] == "response.completed"
        return {"output": done}

    def text(self, reply: Any) -> str:
        said = [item for item in reply["output"] if item["type"] == "message"]
        return "".join(part["text"] for item in said for part in item["content"])


class MessagesClient:
    path = "/v1/messages?beta=true"

    def __init__(self) -> None:
        self.said: list[Any] = [{"role": "user", "content": "Weather?"}]

    def first(self) -> dict[str, Any]:
        tool = {"name": "weather", "input_schema": SCHEMA}
        return {"model": MODEL, "max_tokens": 400, "messages": self.said, "tools": [tool]}

    def second(self, reply: Any) -> dict[str, Any]:
        (call,) = [block for block in reply["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "21"}
        self.said += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": [result]},
        ]
        return self.first()

    def whole(self, events: list[Any]) -> Any:
        blocks: list[Any] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append(event["content_block"] | {"json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                blocks[-1]["json"] += delta.get("partial_json", "")
                if "text" in delta:
                    blocks[-1]["text"] += delta["text"]
        for block in blocks:
            given = block.pop("json")
            if block["type"] == "tool_use":
                block["input"] = json.loads(given)
        assert events[-1]["type"] == "message_stop"
        return {"content": blocks}

    def text(self, reply: Any) -> str:
        return "".join(block["text"] for block in reply["content"] if block["type"] == "text")


def events_of(stream: bytes) -> Iterator[Any]:
    for line in stream.splitlines():
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))


async def ask(world: World, access: Access, client: Client, body: Any, stream: bool) -> Any:
    shown = {"x-api-key": access.token}
    url = f"{access.urls['anthropic']}{client.path}"
    async with world.http.post(url, json=body | {"stream": stream}, headers=shown) as answer:
        heard = await answer.read()
    assert answer.status == 200, heard
    return client.whole(list(events_of(heard))) if stream else json.loads(heard)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("wire", [ChatClient, ResponsesClient, MessagesClient])
async def test_a_conversation_with_a_tool_is_captured_token_for_token(
    world, wire: type[Client], stream: bool
) -> None:
    world.policy.says = says
    access = await world.open()
    client = wire()
    reply = await ask(world, access, client, client.first(), stream)
    assert client.text(reply).strip() == "Let me look."
    reply = await ask(world, access, client, client.second(reply), stream)
    assert client.text(reply) == "It is 21 degrees."
    captured = await world.pool.end(access.session)
    first, second = world.policy.calls
    seen = first.prompt.token_ids.tolist() + first.sampled
    assert second.prompt.token_ids.tolist()[: len(seen)] == seen
    (segment,) = captured.segments
    assert segment.token_ids.tolist() == second.prompt.token_ids.tolist() + second.sampled
    assert segment.token_ids[segment.trained].tolist() == first.sampled + second.sampled
    logprobs = segment.logprobs[segment.trained].tolist()
    assert logprobs == pytest.approx(first.logprobs + second.logprobs)


async def test_tokens_after_tokens_are_one_segment(world) -> None:
    access = await world.open()
    ids: list[int] = [257, 1, 2, 3]
    for _ in range(3):
        body = {"model": MODEL, "token_ids": ids, "sampling_params": {"logprobs": 1}}
        status, reply = await world.post(access, "/inference/v1/generate", body)
        assert status == 200
        (choice,) = reply["choices"]
        ids = [*ids, *choice["token_ids"], 4, 5]
    captured = await world.pool.end(access.session)
    (segment,) = captured.segments
    assert segment.token_ids.tolist() == ids[:-2]
    assert segment.num_trained == 21


async def test_tokens_that_go_on_from_nothing_known_are_a_branch(world) -> None:
    access = await world.open()
    for ids in ([257, 1], [257, 2]):
        body = {"model": MODEL, "token_ids": ids}
        status, _ = await world.post(access, "/inference/v1/generate", body)
        assert status == 200
    captured = await world.pool.end(access.session)
    assert [segment.token_ids[1] for segment in captured.segments] == [1, 2]


async def test_a_token_that_the_policy_does_not_know_is_refused(world) -> None:
    access = await world.open()
    body = {"model": MODEL, "token_ids": [1, 70000]}
    status, refused = await world.post(access, "/inference/v1/generate", body)
    assert (status, refused["error"]["param"]) == (400, "token_ids")
    assert "70000" in refused["error"]["message"]
