"""What is no HTTP, or not what the gateway speaks, and who may not speak: to the real server."""

import zlib
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from gateway_harness import (
    CHAT,
    JSON,
    MESSAGES,
    RESPONSES,
    WIRES,
    body_of,
    head_of,
    raw,
    running_gateway,
    said_of,
    send,
)

from treadle_gateway.terms import Access
from treadle_gateway.testing import World

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with running_gateway(tmp_path_factory.mktemp("gateway")) as world:
        yield world


@pytest.fixture
def world(gateway: World) -> World:
    gateway.policy.reset()
    return gateway


async def test_H2_a_body_that_is_too_large_is_refused_before_it_came(world: World) -> None:
    access = await world.open()
    answer = await raw(world, access, head_of(access, f"Content-Length: {33 * 2**20}"))
    assert answer.startswith(b"HTTP/1.1 413")
    body = b"x" * (32 * 2**20 + 1)
    status, refused = await send(
        world, access, MESSAGES, zlib.compress(body), JSON | {"Content-Encoding": "deflate"}
    )
    assert (status, refused["error"]["type"]) == (413, "request_too_large")


async def test_H2_a_body_that_does_not_end_is_not_waited_for(world: World) -> None:
    access = await world.open()
    chunked = head_of(access, "Transfer-Encoding: chunked")
    assert (await raw(world, access, chunked, b"5\r\n{    \r\n")).startswith(b"HTTP/1.1 408")
    short = head_of(access, "Content-Length: 100")
    assert (await raw(world, access, short, b"{")).startswith(b"HTTP/1.1 408")
    broken = await raw(world, access, chunked, b"what is no chunk\r\n")
    assert broken.split()[1] == b"400"


async def test_H3_a_wrong_type_method_or_path_is_told(world: World) -> None:
    access = await world.open()
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        status, _ = await send(world, access, CHAT, b"{}", {"Content-Type": kind})
        assert status == 415
    base, headers = access.urls["anthropic"], {"x-api-key": access.token}
    for method, path, status in (
        ("GET", CHAT, 405),
        ("PUT", MESSAGES, 405),
        ("DELETE", RESPONSES, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/what", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("OPTIONS", CHAT, 405),
        ("GET", "/v1/../../etc/passwd", 404),
    ):
        async with world.http.request(method, f"{base}{path}", headers=headers) as answer:
            assert answer.status == status, (method, path)
            assert "error" in await answer.json()
            assert ("Allow" in answer.headers) == (status == 405)
    async with world.http.head(f"{base}/api/hello") as answer:
        assert answer.status == 404
    upgrade = headers | {"Upgrade": "websocket", "Connection": "Upgrade"}
    async with world.http.get(f"{base}{RESPONSES}", headers=upgrade) as answer:
        assert answer.status == 426


@pytest.mark.parametrize("path", WIRES)
async def test_H4_H5_who_has_no_token_of_a_session_is_told_nothing_of_it(
    world: World, path: str
) -> None:
    access, ended = await world.open(), await world.open()
    await world.pool.end(ended.session)
    body = body_of(path)
    for token, status in (("", 401), ("x" * 43, 401), (ended.token, 401)):
        stranger = Access(access.session, token, access.urls)
        got, refused = await world.post(stranger, path, body)
        assert (got, said_of(path, refused)[0]) == (status, "authentication_error")
    got, refused = await world.post(ended, path, body)
    assert (got, said_of(path, refused)[1]) == (410, "session ended")
    nobody = Access(
        "0" * 32,
        access.token,
        {"anthropic": access.urls["anthropic"].replace(access.session, "0" * 32)},
    )
    assert (await world.post(nobody, path, body))[0] == 401
    assert not world.policy.calls


async def test_H21_an_image_of_500_MB_is_not_taken(world: World) -> None:
    access = await world.open()
    answer = await raw(world, access, head_of(access, f"Content-Length: {500 * 2**20}"))
    assert answer.startswith(b"HTTP/1.1 413")


async def test_H23_headers_without_end_are_refused(world: World) -> None:
    access = await world.open()
    for headers in (
        [f"X-Long: {'x' * 10_000}"],
        [f"X-{i}: {i}" for i in range(1000)],
        ["Content-Length: 2", "Transfer-Encoding: chunked"],
        ["Content-Length: 2", "Content-Length: 3"],
        ["Content-Length: -1"],
        ["X Y: z"],
    ):
        answer = await raw(world, access, head_of(access, *headers), b"{}")
        assert answer.split()[1] in (b"400", b"431"), headers[0][:40]
    for headers in ([f"X-Long: {'x' * 2**20}"], [f"X-{i}: {i}" for i in range(10_000)]):
        answer = await raw(world, access, head_of(access, *headers), b"{}")
        assert not answer or answer.split()[1] in (b"400", b"431")
    assert (await world.chat(access, "Hi"))[0] == 200


OF_ENGINES = (
    *("/update_weights", "/pause", "/resume", "/collective_rpc", "/load_lora_adapter", "/sleep"),
    *("/unload_lora_adapter", "/invocations", "/tokenize", "/detokenize", "/metrics", "/wake_up"),
    *("/flush_cache", "/ping", "/docs", "/openapi.json", "/.env", "/v1/load_lora_adapter"),
    *("/v1/embeddings", "/v1/files", "/v1/batches"),
)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_H29_paths_of_an_engine_are_not_there(world: World, method: str) -> None:
    access = await world.open()
    headers = {"x-api-key": access.token}
    root = access.urls["anthropic"].removesuffix(f"/s/{access.session}")
    for path in OF_ENGINES:
        for base in (root, access.urls["anthropic"]):
            async with world.http.request(method, f"{base}{path}", headers=headers) as answer:
                assert answer.status == 404, path
    for path in ("/health", "/healthz"):
        async with world.http.get(f"{root}{path}") as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "serving"})


async def test_no_token_is_written_to_the_log(world: World) -> None:
    access = await world.open()
    await world.chat(access, "Hi")
    await world.post(access, "/v1/nothing", {})
    await raw(world, access, head_of(access, "X Y: z"))
    assert access.token not in world.pool._settings.log.read_text()
