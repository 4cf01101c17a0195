"""Replies and streams as the official SDKs read them, by their own models, over HTTP."""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from treadle_gateway.conversation import Ask, Event, Reply, Text
from treadle_gateway.conversation import Message as Said
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires import sse
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.messages import Messages, counted
from treadle_gateway.wires.models import models
from treadle_gateway.wires.responses import Responses
from treadle_gateway.wires.wire import Begun, Wire

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")
chat_types = pytest.importorskip("openai.types.chat")
responses_types = pytest.importorskip("openai.types.responses")
messages_types = pytest.importorskip("anthropic.types")
pydantic = pytest.importorskip("pydantic")

pytestmark = pytest.mark.processes  # a server, and SDKs that take seconds to import

ASK = Ask(model="policy", messages=(Said("user", (Text("hi"),)),), logprobs=True)
HELLO: Any = [{"role": "user", "content": "hi"}]


class Answers(HTTPServer):
    """Answers whatever is asked with the same bytes."""

    kind = "application/json"
    status = 200
    body = b""

    def says(self, body: bytes, *, stream: bool = False, status: int = 200) -> None:
        self.body, self.status = body, status
        self.kind = "text/event-stream" if stream else "application/json"


class _Handler(BaseHTTPRequestHandler):
    server: Answers

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(self.server.status)
        self.send_header("content-type", self.server.kind)
        self.end_headers()
        self.wfile.write(self.server.body)

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Answers]:
    with Answers(("127.0.0.1", 0), _Handler) as answers:
        thread = threading.Thread(target=answers.serve_forever, args=(0.01,))
        thread.start()
        yield answers
        answers.shutdown()
        thread.join()


@pytest.fixture
def speaks_openai(server: Answers) -> Iterator[Any]:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with openai.OpenAI(base_url=url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
def speaks_anthropic(server: Answers) -> Iterator[Any]:
    url = f"http://127.0.0.1:{server.server_port}"
    with anthropic.Anthropic(base_url=url, api_key="k", max_retries=0) as client:
        yield client


Play = Callable[[Wire, Ask, Reply, Any], bytes]
Read = Callable[[bytes], list[tuple[str, Any]]]


def test_a_chat_reply_satisfies_the_strict_model(reply: Reply) -> None:
    found = chat_types.ChatCompletion.model_validate(Chat().reply(ASK, reply), strict=True)
    assert found.choices[0].message.tool_calls is not None
    assert found.choices[0].finish_reason == "tool_calls"


def test_every_chat_chunk_satisfies_the_strict_model(
    reply: Reply, events: list[Event], play: Play, read: Read
) -> None:
    chunks = [data for _, data in read(play(Chat(), ASK, reply, events)) if data != "[DONE]"]
    assert all(
        chat_types.ChatCompletionChunk.model_validate(chunk, strict=True) for chunk in chunks
    )


def test_a_responses_reply_satisfies_the_strict_model(reply: Reply) -> None:
    found = responses_types.Response.model_validate_json(
        sse.dumps(Responses().reply(ASK, reply)), strict=True
    )
    assert [item.type for item in found.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]


def test_every_responses_event_satisfies_the_strict_model(
    reply: Reply, events: list[Event], play: Play, read: Read
) -> None:
    adapter = pydantic.TypeAdapter(responses_types.ResponseStreamEvent)
    for name, data in read(play(Responses(), ASK, reply, events)):
        found = adapter.validate_json(sse.dumps(data), strict=True)
        assert found.type == name


def test_a_messages_reply_satisfies_the_strict_model(reply: Reply) -> None:
    found = messages_types.Message.model_validate_json(
        sse.dumps(Messages().reply(ASK, reply)), strict=True
    )
    assert found.stop_reason == "tool_use"


def test_every_messages_event_satisfies_the_strict_model(
    reply: Reply, events: list[Event], play: Play, read: Read
) -> None:
    adapter = pydantic.TypeAdapter(messages_types.RawMessageStreamEvent)
    for name, data in read(play(Messages(), ASK, reply, events)):
        found = adapter.validate_json(sse.dumps(data), strict=True)
        assert found.type == name


def test_the_chat_stream_helper_gathers_the_whole_reply(
    server: Answers, speaks_openai: Any, reply: Reply, events: list[Event], play: Play
) -> None:
    server.says(play(Chat(), ASK, reply, events), stream=True)
    with speaks_openai.chat.completions.stream(model="policy", messages=HELLO) as stream:
        found = stream.get_final_completion()
    assert found.choices[0].message.content == "About to call."
    calls = found.choices[0].message.tool_calls
    assert [call.function.arguments for call in calls] == [c.arguments for c in reply.message.calls]
    assert found.usage.completion_tokens == 4
    assert len(found.choices[0].logprobs.content) == 4


def test_the_responses_stream_helper_gathers_the_whole_reply(
    server: Answers, speaks_openai: Any, reply: Reply, events: list[Event], play: Play
) -> None:
    server.says(play(Responses(), ASK, reply, events), stream=True)
    with speaks_openai.responses.stream(model="policy", input="hi") as stream:
        found = stream.get_final_response()
    assert found.output_text == "About to call."
    assert [item.arguments for item in found.output[2:]] == [
        call.arguments for call in reply.message.calls
    ]
    assert found.usage.input_tokens_details.cached_tokens == 60


def test_the_messages_stream_helper_gathers_the_whole_reply(
    server: Answers, speaks_anthropic: Any, reply: Reply, events: list[Event], play: Play
) -> None:
    server.says(play(Messages(), ASK, reply, events), stream=True)
    with speaks_anthropic.messages.stream(model="policy", max_tokens=9, messages=HELLO) as stream:
        found = stream.get_final_message()
    assert [block.type for block in found.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert found.content[3].input == {"city": "\u2028é"}
    assert found.usage.output_tokens == 4


def test_a_failure_in_a_chat_stream_is_raised(
    server: Answers, speaks_openai: Any, reply: Reply
) -> None:
    stream = Chat().stream(ASK, Begun("0", 1, 1, 0))
    failure = stream.failed(RefusedError("unavailable", "the engine is gone"))
    server.says(stream.start() + failure, stream=True)
    with pytest.raises(openai.APIError, match="the engine is gone"):
        list(speaks_openai.chat.completions.create(model="policy", messages=HELLO, stream=True))


def test_a_failure_in_a_messages_stream_is_raised(
    server: Answers, speaks_anthropic: Any, reply: Reply
) -> None:
    stream = Messages().stream(ASK, Begun("0", 1, 1, 0))
    failure = stream.failed(RefusedError("unavailable", "the engine is gone"))
    server.says(stream.start() + failure, stream=True)
    with (
        pytest.raises(anthropic.APIStatusError, match="the engine is gone"),
        speaks_anthropic.messages.stream(model="policy", max_tokens=9, messages=HELLO) as found,
    ):
        found.get_final_message()


def test_a_failure_in_a_responses_stream_is_a_failed_response(
    server: Answers, speaks_openai: Any
) -> None:
    stream = Responses().stream(ASK, Begun("0", 1, 1, 0))
    failure = stream.failed(RefusedError("busy", "full"))
    server.says(stream.start() + stream.ping() + failure, stream=True)
    found = list(speaks_openai.responses.create(model="policy", input="hi", stream=True))
    assert found[-1].type == "response.failed"
    assert found[-1].response.error.code == "rate_limit_exceeded"


def test_an_overflow_is_understood_by_both_sdks(
    server: Answers, speaks_openai: Any, speaks_anthropic: Any
) -> None:
    error = RefusedError("overflow", "", tokens=9000, limit=8192)
    server.says(sse.dumps(Chat().refusal(error)[2]).encode(), status=400)
    with pytest.raises(openai.BadRequestError) as refused:
        speaks_openai.chat.completions.create(model="policy", messages=HELLO)
    assert refused.value.code == "context_length_exceeded"
    server.says(sse.dumps(Messages().refusal(error)[2]).encode(), status=400)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 9000 tokens > 8191"):
        speaks_anthropic.messages.create(model="policy", max_tokens=9, messages=HELLO)


def test_models_and_counts_are_read_by_both_sdks(
    server: Answers, speaks_openai: Any, speaks_anthropic: Any
) -> None:
    server.says(sse.dumps(models("policy", created=1_700_000_000, max_context=8192)).encode())
    assert [model.id for model in speaks_openai.models.list()] == ["policy"]
    assert [model.created_at.year for model in speaks_anthropic.models.list().data] == [2023]
    server.says(sse.dumps(counted(42)).encode())
    assert speaks_anthropic.messages.count_tokens(model="policy", messages=HELLO).input_tokens == 42
