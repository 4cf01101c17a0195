"""A channel over several addresses, of which one serves."""

import asyncio
import contextlib
import tempfile
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from treadle_runtime.channel import call, connect
from treadle_runtime.errors import RemoteError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Silent(health_pb2_grpc.HealthServicer):
    """Takes calls, and never answers: what a process looks like that stands still."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Check(self, request, context):
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()


@pytest.fixture
async def serve():
    """Serves health at an address, as said."""
    async with contextlib.AsyncExitStack() as started:

        async def start(address: str, said: int | Silent) -> grpc.aio.Server:
            server = grpc.aio.server()
            servicer = said
            if not isinstance(said, Silent):
                servicer = health.aio.HealthServicer()
                await servicer.set("", said)
            health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
            server.add_insecure_port(address)
            await server.start()
            started.push_async_callback(server.stop, None)
            return server

        yield start


@pytest.fixture
def addresses():
    with tempfile.TemporaryDirectory(prefix="treadle") as directory:
        yield [f"unix:{Path(directory) / name}" for name in ("a", "b", "c")]


async def check(channel, *, timeout_s: float = 5.0, budget_s: float = 5.0) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    return (await call(stub.Check, request, timeout_s=timeout_s, budget_s=budget_s)).status


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_whichever_serves_is_found(serve, addresses, place) -> None:
    await serve(addresses[place], NOT_SERVING)

    async with connect(addresses) as channel:
        assert await check(channel) == NOT_SERVING


@pytest.mark.parametrize("place", [0, 1, 2])
async def test_one_call_goes_round_until_an_address_takes_it(serve, addresses, place) -> None:
    await serve(addresses[place], NOT_SERVING)

    async with connect(addresses) as channel:
        assert await check(channel, budget_s=0.0) == NOT_SERVING


async def test_a_call_that_no_address_takes_fails(addresses) -> None:
    async with connect(addresses) as channel:
        with pytest.raises(RemoteError, match="UNAVAILABLE"):
            await check(channel, budget_s=0.0)


async def test_one_that_ended_is_left_for_its_successor(serve, addresses) -> None:
    first = await serve(addresses[0], NOT_SERVING)
    async with connect(addresses) as channel:
        before = await check(channel)
        await first.stop(None)
        await serve(addresses[1], SERVING)

        assert (before, await check(channel)) == (NOT_SERVING, SERVING)


async def test_one_that_stands_still_is_left_once_another_serves(serve, addresses) -> None:
    await serve(addresses[0], Silent())
    async with connect(addresses) as channel:
        waiting = asyncio.ensure_future(check(channel, timeout_s=60.0))
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        await serve(addresses[1], SERVING)

        assert not done
        assert await waiting == SERVING  # long before its own time is over
        assert channel.current == 1


async def test_a_slow_answer_is_waited_for_while_nobody_else_serves(serve, addresses) -> None:
    await serve(addresses[0], Silent())
    await serve(addresses[1], NOT_SERVING)

    async with connect(addresses) as channel:
        with pytest.raises(RemoteError, match="DEADLINE_EXCEEDED"):
            await check(channel, timeout_s=1.2, budget_s=0.0)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_caller_that_gives_up_leaves_no_call_behind(serve, addresses, count) -> None:
    silent = Silent()
    await serve(addresses[0], silent)
    async with connect(addresses[0] if count == 1 else addresses) as channel:
        waiting = asyncio.ensure_future(check(channel, timeout_s=100.0))
        await asyncio.wait({waiting}, timeout=0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        await asyncio.wait_for(silent.cancelled.wait(), 5)
