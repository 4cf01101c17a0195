"""What one request becomes: streams, retries, clients that leave, and a policy that fails."""

import asyncio
import contextlib
import json
import re
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest

from treadle_core.errors import Kind
from treadle_core.tickets import Sampling
from treadle_gateway.records import PolicyError
from treadle_gateway.settings import Limits
from treadle_gateway.terms import Access
from treadle_gateway.testing import MODEL, PATIENCE_S, Call, World, conversation, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

LONG = "one two three four five six"
WORDS = "x" * 5000
"""With log-probabilities a reply of more bytes than sockets hold."""


def chat_body(*said: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": conversation(*said)} | fields


def bearer(access: Access) -> dict[str, str]:
    return {"Authorization": f"Bearer {access.token}"}


def request(world: World, access: Access, *said: str, **fields: Any) -> Any:
    url = f"{access.urls['openai']}/chat/completions"
    return world.http.post(url, json=chat_body(*said, **fields), headers=bearer(access))


def held_after(tokens: int) -> tuple[asyncio.Event, Callable[[Call], Any]]:
    """Lets the policy say so many tokens of each turn, and the rest when the event is set."""
    go_on = asyncio.Event()

    async def before(call: Call) -> None:
        if len(call.sampled) >= tokens:
            await go_on.wait()
        await asyncio.sleep(0)

    return go_on, before


def said_in(stream: bytes) -> str:
    """The words of a chat stream that came to its end."""
    assert stream.endswith(b"data: [DONE]\n\n")
    return said_so_far(stream)


def said_so_far(stream: bytes) -> str:
    chunks = [line[6:] for line in stream.splitlines() if line.startswith(b"data: {")]
    deltas = [json.loads(chunk)["choices"] for chunk in chunks]
    return "".join(choice["delta"].get("content") or "" for each in deltas for choice in each)


async def test_two_turns_are_one_segment_of_the_very_tokens(world) -> None:
    access = await world.open()
    for said in (["Hi"], ["Hi", "Hello.", "And you?"]):
        status, reply = await world.chat(access, *said)
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "Hello.")
    captured = await world.pool.end(access.session)
    (segment,) = captured.segments
    first, second = world.policy.calls
    assert segment.token_ids.tolist() == second.prompt.token_ids.tolist() + second.sampled
    assert segment.token_ids[segment.trained].tolist() == first.sampled + second.sampled
    logprobs = segment.logprobs[segment.trained].tolist()
    assert logprobs == pytest.approx(first.logprobs + second.logprobs)
    assert captured.outcome is None


async def test_a_stream_says_what_a_whole_reply_says(world) -> None:
    world.policy.says = lambda _: LONG
    access = await world.open()
    async with request(world, access, "Hi", stream=True) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        assert said_in(await answer.read()) == LONG


async def test_what_is_sampled_is_streamed_before_the_turn_is_over(world) -> None:
    world.policy.says = lambda _: LONG
    go_on, world.policy.before = held_after(5)
    access = await world.open()
    async with request(world, access, "Hi", stream=True) as answer:
        heard = b""
        while said_so_far(heard) != "one t":
            heard += await answer.content.readany()
        assert world.policy.running == 1
        go_on.set()
        assert said_in(heard + await answer.read()) == LONG


async def test_a_silent_stream_says_that_it_is_alive(world_of) -> None:
    async with world_of(limits=Limits(ping_s=0.05)) as world:
        go_on, world.policy.before = held_after(0)
        access = await world.open()
        async with request(world, access, "Hi", stream=True) as answer:
            heard = b""
            while b": ping" not in heard:
                heard += await answer.content.readany()
            go_on.set()
            assert said_in(heard + await answer.read()) == "Hello."


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_is_not_sampled_for(world, stream: bool) -> None:
    world.policy.says = lambda _: LONG
    _, world.policy.before = held_after(5)
    access = await world.open()
    asking = asyncio.create_task(read(request(world, access, "Hi", stream=stream)))
    await until(lambda: bool(world.policy.calls) and len(world.policy.calls[0].sampled) == 5)
    asking.cancel()
    await asyncio.wait({asking})
    async with asyncio.timeout(5):
        await until(lambda: world.policy.running == 0)
    captured = await world.pool.end(access.session)
    (segment,) = captured.segments
    assert segment.token_ids[segment.sampled].tolist() == world.policy.calls[0].sampled
    assert segment.num_trained == 0
    assert captured.counts["untrained.the client went away"] == 1


async def test_who_asks_again_after_leaving_gets_a_whole_reply(world) -> None:
    world.policy.says = lambda _: LONG
    go_on, world.policy.before = held_after(5)
    access = await world.open()
    asking = asyncio.create_task(read(request(world, access, "Hi")))
    await until(lambda: bool(world.policy.calls) and len(world.policy.calls[0].sampled) == 5)
    asking.cancel()
    await asyncio.wait({asking})
    await until(lambda: world.policy.running == 0)
    go_on.set()
    _, reply = await world.chat(access, "Hi")
    assert reply["choices"][0]["message"]["content"] == LONG
    captured = await world.pool.end(access.session)
    assert [segment.num_trained for segment in captured.segments] == [0, len(LONG) + 1]


async def test_identical_requests_at_once_share_one_generation(world) -> None:
    world.policy.says = lambda _: LONG
    go_on, world.policy.before = held_after(5)
    access = await world.open()
    async with contextlib.AsyncExitStack() as stack:
        answers, heard = [], []
        for _ in range(4):
            asked = request(world, access, "Hi", stream=True)
            answers.append(await stack.enter_async_context(asked))
            heard.append(await answers[-1].content.readany())
        answers[0].close()  # who joined hears it to its end, whoever began it
        go_on.set()
        replies = [
            first + await answer.read()
            for first, answer in zip(heard[1:], answers[1:], strict=True)
        ]
    assert {said_in(reply) for reply in replies} == {LONG}
    assert len(set(replies)) == 1
    captured = await world.pool.end(access.session)
    assert len(world.policy.calls) == 1
    assert [segment.num_trained for segment in captured.segments] == [len(LONG) + 1]


async def test_identical_requests_that_are_rendered_at_once_share_one_generation(world) -> None:
    go_on, world.policy.before = held_after(1)
    access = await world.open()
    joined = asyncio.Barrier(6)

    async def ask() -> bytes:
        said = "word " * 5000  # so much is rendered in a thread
        async with request(world, access, said, stream=True) as answer:
            heard = await answer.content.readany()
            await joined.wait()
            go_on.set()
            return heard + await answer.read()

    replies = await asyncio.gather(*(ask() for _ in range(6)))
    assert len(set(replies)) == len(world.policy.calls) == 1
    captured = await world.pool.end(access.session)
    assert captured.counts["joined"] == 5


async def test_different_requests_at_once_are_branches(world) -> None:
    world.policy.says = lambda prompt: prompt.rsplit("user\n")[-1][:3]
    access = await world.open()
    said = [f"{i:03}" for i in range(8)]
    replies = await asyncio.gather(*(world.chat(access, each) for each in said))
    told = [reply["choices"][0]["message"]["content"] for _, reply in replies]
    assert told == said
    captured = await world.pool.end(access.session)
    assert [segment.num_trained for segment in captured.segments] == [4] * 8


async def test_a_reply_that_was_delivered_is_not_said_again(world) -> None:
    access = await world.open()
    (_, first), (_, second) = [await world.chat(access, "Hi") for _ in range(2)]
    assert first["id"] != second["id"]
    captured = await world.pool.end(access.session)
    assert [segment.num_trained for segment in captured.segments] == [7, 7]


async def test_a_reply_that_nobody_took_is_said_again_byte_for_byte(world) -> None:
    world.policy.says = lambda _: WORDS
    access = await world.open(sampling=Sampling(max_tokens=65000))
    with raw(access) as connection:
        await send(connection, post(access, chat_body("Hi", logprobs=True)))
        heard = await until_some(connection)  # it is not streamed: all of it is sampled
    again = await read(request(world, access, "Hi", logprobs=True))
    third = await read(request(world, access, "Hi", logprobs=True))
    assert again.startswith(heard.partition(b"\r\n\r\n")[2])
    assert not third.startswith(again[:100])
    captured = await world.pool.end(access.session)
    assert len(world.policy.calls) == 2
    assert [segment.num_trained for segment in captured.segments] == [len(WORDS) + 1] * 2
    assert captured.counts["replayed"] == 1


async def test_a_client_that_does_not_read_is_let_go(world_of) -> None:
    async with world_of(limits=Limits(slow_reader_s=0.3)) as world:
        world.policy.says = lambda _: WORDS
        access = await world.open(sampling=Sampling(max_tokens=65000))
        with raw(access) as connection:
            watch = select.poll()
            watch.register(connection, 0)
            await send(connection, post(access, chat_body("Hi", logprobs=True)))
            await until(lambda: bool(watch.poll(0)))
            assert watch.poll(0)[0][1] & select.POLLHUP
        captured = await world.pool.end(access.session)
    assert captured.segments[0].num_trained == 0
    assert captured.counts["untrained.undelivered"] == 1


async def test_a_refusal_without_a_body_leaves_the_connection_as_it_was(world) -> None:
    access = await world.open()
    with raw(access) as connection:
        await send(connection, b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await until_some(connection)
        assert head.startswith(b"HTTP/1.1 405 ")
        assert head.endswith(b"\r\n\r\n")
        await send(connection, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await until_some(connection)).endswith(b'\r\n\r\n{"status":"serving"}')


async def test_a_policy_that_fails_before_it_says_anything_is_a_503(world) -> None:
    access = await world.open()

    async def before(call: Call) -> None:
        raise PolicyError(Kind.UNAVAILABLE, "refitting", "", 2.5)

    world.policy.before = before
    for stream in (True, False):
        async with request(world, access, "Hi", stream=stream) as answer:
            assert answer.status == 503
            assert float(answer.headers["Retry-After"]) >= 2
            assert "refitting" in (await answer.json())["error"]["message"]
    captured = await world.pool.end(access.session)
    assert captured.segments == ()
    assert captured.counts["untrained.policy"] == 2


async def test_a_policy_that_fails_in_mid_stream_ends_it_with_an_error(world) -> None:
    world.policy.says = lambda _: LONG
    access = await world.open()
    go_on, hold = held_after(5)

    async def before(call: Call) -> None:
        await hold(call)
        if len(call.sampled) == 5:
            raise RuntimeError

    world.policy.before = before
    async with request(world, access, "Hi", stream=True) as answer:
        heard = await answer.content.readany()
        go_on.set()
        while b'"error"' not in heard:
            heard += await answer.content.readany()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    assert b"[DONE]" not in heard
    captured = await world.pool.end(access.session)
    assert captured.segments[0].num_trained == 0


async def test_a_policy_that_says_nothing_is_no_reply(world) -> None:
    access = await world.open()
    world.policy.piece = 0
    status, refused = await world.chat(access, "Hi")
    assert (status, refused["error"]["message"]) == (503, "the policy sampled nothing")


async def test_each_token_states_the_version_that_sampled_it(world) -> None:
    world.policy.says = lambda _: LONG

    async def before(call: Call) -> None:
        world.policy.version = 1 if len(call.sampled) < 5 else 2

    world.policy.before = before
    access = await world.open()
    await world.chat(access, "Hi")
    (segment,) = (await world.pool.end(access.session)).segments
    versions = segment.policy_version[segment.sampled].tolist()
    assert versions == [1] * 5 + [2] * (len(LONG) - 4)


async def test_sampling_that_is_not_the_recipes_is_honoured_and_not_trained(world_of) -> None:
    async with world_of(other_sampling="untrained", supported=frozenset({"top_k"})) as world:
        access = await world.open()
        status, _ = await world.chat(access, "Hi", temperature=0.5, top_k=3)
        assert status == 200
        assert (await world.chat(access, "Hi", seed=3))[0] == 400
        captured = await world.pool.end(access.session)
    (call,) = world.policy.calls
    assert call.prompt.sampling == Sampling(temperature=0.5, max_tokens=512, top_k=3)
    assert captured.segments[0].num_trained == 0
    assert captured.counts["other_sampling.temperature"] == 1
    assert captured.counts["untrained.other_sampling"] == 1


async def test_a_label_that_is_not_chosen_is_not_trained(world_of) -> None:
    async with world_of(trained=frozenset({"subagent"})) as world:
        access = await world.open()
        await world.chat(access, "Hi")
        captured = await world.pool.end(access.session)
    assert captured.segments[0].num_trained == 0
    assert captured.counts["untrained.other_label"] == 1


async def test_a_stop_text_never_shows_and_its_tokens_are_kept(world) -> None:
    world.policy.says = lambda _: LONG
    access = await world.open()
    status, reply = await world.chat(access, "Hi", stop=["three"])
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "one two ")
    await until(lambda: world.policy.running == 0)
    (segment,) = (await world.pool.end(access.session)).segments
    trained = segment.token_ids[segment.trained].tolist()
    assert trained == world.policy.calls[0].sampled[: len(trained)]
    assert len("one two three") <= len(trained)


async def test_a_prompt_without_room_is_refused_with_both_numbers(world_of) -> None:
    async with world_of(max_context=256) as world:
        access = await world.open()
        status, refused = await world.chat(access, "x" * 500)
        assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")
        assert {"256", "519"} <= set(re.findall(r"\d+", refused["error"]["message"]))


async def test_tokens_are_counted_as_they_would_be_asked(world) -> None:
    access = await world.open()
    body = chat_body("Hi") | {"max_tokens": 10}
    status, counted = await world.post(access, "/v1/messages/count_tokens", body)
    await world.post(access, "/v1/messages", body)
    assert status == 200
    assert counted["input_tokens"] == world.policy.calls[0].prompt.token_ids.size


async def read(asked: Any) -> bytes:
    async with asked as answer:
        return await answer.read()


@contextlib.contextmanager
def raw(access: Access) -> Iterator[socket.socket]:
    """A connection that takes little before it reads."""
    host, port = access.urls["openai"].split("/")[2].split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.setblocking(False)
        yield connection


async def send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def until_some(connection: socket.socket) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await asyncio.get_running_loop().sock_recv(connection, 1000)


def post(access: Access, body: Any) -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST /s/{access.session}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        f"Authorization: Bearer {access.token}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
