"""What the tests of bad input to the gateway send, and what they expect of a refusal."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from treadle_gateway.settings import GatewaySettings, Limits
from treadle_gateway.terms import Access
from treadle_gateway.testing import MODEL, Scripted, World, conversation, serving, write_model

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
WIRES = (CHAT, RESPONSES, MESSAGES)
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def running_gateway(folder: Path) -> AsyncGenerator[World]:
    """A real worker, which has nothing to complain of at the end."""
    settings = GatewaySettings(
        model_folder=folder / "model",
        model_name=MODEL,
        max_context=2048,
        log=folder / "gateway.log",
        limits=Limits(body_s=1.5),
    )
    policy = Scripted(write_model(folder / "model"))
    async with serving(settings, policy) as world:
        yield world
        assert world.pool.restarts == 0
    assert "Traceback" not in settings.log.read_text()


def body_of(path: str, *said: str, **fields: Any) -> dict[str, Any]:
    """A request that is well, but for `fields`."""
    key = "input" if path == RESPONSES else "messages"
    bound = {"max_tokens": 100} if path == MESSAGES else {}
    return {"model": MODEL, key: conversation(*said or ("Hi",))} | bound | fields


async def send(
    world: World, access: Access, path: str, data: bytes, headers: dict[str, str] = JSON
) -> tuple[int, Any]:
    shown = {"Authorization": f"Bearer {access.token}"} | headers
    url = f"{access.urls['anthropic']}{path}"
    async with world.http.post(url, data=data, headers=shown) as answer:
        return answer.status, await answer.json()


def said_of(path: str, refused: Any) -> tuple[str, str]:
    """Type and words of a refusal, in the shape of its wire."""
    if path == MESSAGES:
        assert refused["type"] == "error"
        return refused["error"]["type"], refused["error"]["message"]
    assert set(refused["error"]) == {"message", "type", "param", "code"}
    return refused["error"]["type"], refused["error"]["message"]


async def refuses(world: World, path: str, body: Any, says: str, *, status: int = 400) -> Any:
    """Sends what is wrong to a session that goes on afterwards as if nothing had been."""
    access = await world.open()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    began = time.monotonic()
    got, refused = await send(world, access, path, data)
    took_s = time.monotonic() - began
    kind, message = said_of(path, refused)
    assert (got, says.lower() in message.lower()) == (status, True), (got, message)
    if status == 400:
        assert kind == "invalid_request_error"
    assert not world.policy.calls
    assert (await world.post(access, path, body_of(path)))[0] == 200
    captured = await world.pool.end(access.session)
    assert captured.counts["turns"] == 1
    return took_s


async def raw(world: World, access: Access, head: str, *then: bytes) -> bytes:
    """What comes back of bytes; nothing where the connection ends before they are sent."""
    host, port = access.urls["openai"].split("/")[2].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(head.replace("\n", "\r\n").encode())
        for data in then:
            writer.write(data)
        async with asyncio.timeout(60):
            return await reader.readuntil(b"\r\n\r\n")
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


def head_of(access: Access, *headers: str, path: str = CHAT) -> str:
    lines = [
        f"POST /s/{access.session}{path} HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {access.token}",
        "Content-Type: application/json",
        *headers,
    ]
    return "\n".join(lines) + "\n\n"
