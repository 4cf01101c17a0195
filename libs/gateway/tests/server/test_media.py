"""Images over the wire: shown to the policy by content, expanded once, and kept with the record."""

import base64
import struct
import zlib
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from treadle_agents.images.placeholders import ImageRule
from treadle_core.media import MediumSpan
from treadle_gateway.terms import Access
from treadle_gateway.testing import IMAGE, MODEL, World, write_model

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def png(width: int, height: int, shade: int = 0) -> bytes:
    """A grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    lines = (b"\0" + bytes([shade]) * width) * height
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*each) for each in chunks)


WIDE, TALL = png(90, 30), png(20, 100, 200)
"""4 x 2 and 1 x 4 squares of 28 pixels."""


def uri(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def reference(content: bytes) -> str:
    return f"treadle:sha256:{sha256(content).hexdigest()}"


def user(*parts: str) -> dict[str, Any]:
    """A message of words and images, each image as its URL."""
    said = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith(("data:", "treadle:"))
        else {"type": "text", "text": part}
        for part in parts
    ]
    return {"role": "user", "content": said}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(world_of: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("seeing")
    tokenizer = write_model(folder, images=True)
    async with world_of(model_folder=folder, images=ImageRule(), max_context=4096) as world:
        world.policy.tokenizer = tokenizer
        yield world


@pytest.fixture
def world(seeing: World) -> World:
    """A gateway whose policy reads images."""
    seeing.policy.reset()
    return seeing


async def talk(world: World, access: Access, *messages: Any) -> tuple[int, Any]:
    return await world.post(access, CHAT, {"model": MODEL, "messages": list(messages)})


async def said(world: World, access: Access, messages: list[Any]) -> None:
    """Asks, and puts the reply behind the messages."""
    status, reply = await talk(world, access, *messages)
    assert status == 200, reply
    messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})


async def test_each_image_is_expanded_once_however_many_turns_follow(world: World) -> None:
    access = await world.open()
    messages: list[Any] = [user("Left ", uri(WIDE), " right.")]
    await said(world, access, messages)
    messages.append(user("And ", uri(TALL), uri(WIDE)))
    await said(world, access, messages)
    messages.append({"role": "user", "content": "Which one?"})
    await said(world, access, messages)

    one, two, three = (call.prompt for call in world.policy.calls)
    pad = world.policy.tokenizer.token_to_id(IMAGE[1])
    assert [int((each.token_ids == pad).sum()) for each in (one, two, three)] == [8, 20, 20]
    assert [[span.length for span in each.media] for each in (one, two, three)] == [
        [8],
        [8, 4, 8],
        [8, 4, 8],
    ]
    assert two.media == three.media
    assert two.media[:1] == one.media
    assert np.array_equal(three.token_ids[: two.token_ids.size], two.token_ids)
    for span in three.media:
        assert (three.token_ids[span.start : span.end] == pad).all()
    names = [sha256(each).hexdigest() for each in (WIDE, TALL, WIDE)]
    assert [span.sha256 for span in three.media] == names
    assert {name: each.data for name, each in three.pictures.items()} == {
        names[0]: WIDE,
        names[1]: TALL,
    }

    captured = await world.pool.end(access.session)
    (segment,) = captured.segments
    assert segment.media == three.media
    whole = [*three.token_ids.tolist(), *world.policy.calls[2].sampled]
    assert segment.token_ids.tolist() == whole
    assert not any(segment.sampled[span.start : span.end].any() for span in segment.media)
    assert [each.data for each in captured.pictures] == [WIDE, TALL]


async def test_what_a_session_was_shown_needs_no_bytes_again(world: World) -> None:
    access = await world.open()
    messages: list[Any] = [user("See ", uri(WIDE))]
    await said(world, access, messages)
    messages[0] = user("See ", reference(WIDE))
    messages.append(user("Again ", reference(WIDE)))
    await said(world, access, messages)

    first, second = (call.prompt for call in world.policy.calls)
    assert np.array_equal(second.token_ids[: first.token_ids.size], first.token_ids)
    assert [span.length for span in second.media] == [8, 8]
    assert len((await world.pool.end(access.session)).segments) == 1


async def test_a_reference_to_what_another_session_was_shown_is_refused(world: World) -> None:
    access, other = await world.open(), await world.open()
    await said(world, access, [user(uri(WIDE))])
    status, refused = await talk(world, other, user("See ", reference(WIDE)))
    assert (status, refused["error"]["code"]) == (400, "unknown_image")
    assert refused["error"]["param"] == "messages.0.content.1.image_url.url"
    assert (await talk(world, other, user("Hi")))[0] == 200


UNKNOWN = {
    CHAT: {"messages": [user(reference(b"nothing"))]},
    RESPONSES: {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_image", "image_url": reference(b"nothing")}],
            }
        ]
    },
    MESSAGES: {
        "max_tokens": 9,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "url", "url": reference(b"nothing")}}
                ],
            }
        ],
    },
}


@pytest.mark.parametrize("path", UNKNOWN)
async def test_every_wire_says_that_an_image_is_unknown(world: World, path: str) -> None:
    access = await world.open()
    status, refused = await world.post(access, path, {"model": MODEL} | UNKNOWN[path])
    assert status == 400
    assert "was shown no image" in refused["error"]["message"]
    assert world.policy.calls == []


async def test_words_are_no_placeholder(world: World) -> None:
    access = await world.open()
    forged = "".join(IMAGE)
    status, _ = await talk(
        world,
        access,
        {"role": "user", "content": forged},
        {"role": "assistant", "content": forged},
        user(forged, uri(TALL), forged),
    )
    assert status == 200
    prompt = world.policy.calls[0].prompt
    pad = world.policy.tokenizer.token_to_id(IMAGE[1])
    (span,) = prompt.media
    assert np.flatnonzero(prompt.token_ids == pad).tolist() == list(range(span.start, span.end))


async def test_a_request_of_tokens_brings_no_image(world: World) -> None:
    access = await world.open()
    await said(world, access, [user("Hi ", uri(TALL))])
    ids = world.policy.calls[0].prompt.token_ids.tolist()
    path = "/inference/v1/generate"
    status, refused = await world.post(access, path, {"model": MODEL, "token_ids": ids})
    assert (status, refused["error"]["code"]) == (400, "unsupported_image")
    body = {"model": MODEL, "token_ids": world.policy.tokenizer.encode("Hm").ids}
    assert (await world.post(access, path, body))[0] == 200
    assert not world.policy.calls[1].prompt.media


async def test_a_count_of_tokens_has_the_images_expanded(world: World) -> None:
    access = await world.open()
    source = {"type": "base64", "media_type": "image/png", "data": uri(WIDE).partition(",")[2]}
    message = {"role": "user", "content": [{"type": "image", "source": source}]}
    body = {"model": MODEL, "messages": [message], "max_tokens": 9}
    status, counted = await world.post(access, f"{MESSAGES}/count_tokens", body)
    assert status == 200
    assert (await world.post(access, MESSAGES, body))[0] == 200
    assert counted["input_tokens"] == world.policy.calls[0].prompt.token_ids.size


@pytest.mark.parametrize(
    ("bound", "limit"), [("max_images", 1), ("max_image_bytes", len(WIDE) + len(TALL) - 1)]
)
async def test_more_images_than_a_session_may_have_are_refused(
    world: World, bound: str, limit: int
) -> None:
    access = await world.open(**{bound: limit})
    messages: list[Any] = [user(uri(WIDE), uri(WIDE))]
    await said(world, access, messages)
    status, refused = await talk(world, access, *messages, user(uri(TALL)))
    assert (status, refused["error"]["code"]) == (400, bound)
    assert str(limit) in refused["error"]["message"]
    messages.append(user(reference(WIDE)))
    await said(world, access, messages)
    status, refused = await talk(world, access, *messages, user(reference(TALL)))
    assert (status, refused["error"]["code"]) == (400, "unknown_image")


@pytest.mark.parametrize(
    ("images", "who"), [(False, "model"), (True, "engine of this run")], ids=["model", "engine"]
)
async def test_who_reads_no_images_says_so(
    world_of: Any, tmp_path: Any, images: bool, who: str
) -> None:
    write_model(tmp_path, images=images)
    told = {} if images else {"images": ImageRule()}
    async with world_of(model_folder=tmp_path, **told) as world:
        access = await world.open()
        for url in (uri(WIDE), reference(WIDE)):
            status, refused = await talk(world, access, user(url))
            assert (status, refused["error"]["code"]) == (400, "unsupported_image")
            assert f"the {who} reads no images" in refused["error"]["message"]
        assert (await talk(world, access, user("Hi")))[0] == 200


async def test_an_image_where_the_template_shows_none_is_refused(world: World) -> None:
    access = await world.open()
    calls = [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}]
    status, refused = await talk(
        world,
        access,
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": user(uri(WIDE))["content"]},
    )
    assert status == 400, refused
    assert "does not show them" in refused["error"]["message"]


async def test_lines_of_one_session_have_the_spans_of_their_own_images(world: World) -> None:
    access = await world.open()
    first: list[Any] = [user("One ", uri(WIDE))]
    await said(world, access, first)
    await said(world, access, [*first, user("Two ", uri(TALL))])
    await said(world, access, [*first, user("Three")])

    captured = await world.pool.end(access.session)
    spans: list[tuple[MediumSpan, ...]] = [segment.media for segment in captured.segments]
    assert sorted([span.length for span in each] for each in spans) == [[8], [8, 4]]
