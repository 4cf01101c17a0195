"""A peer whose host is gone sends nothing: a call on its way ends long before its deadline."""

import asyncio
import contextlib
import time

import grpc.aio
import pytest
from fault_proxy import Link, listen

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_runtime.channel import call, connect
from treadle_runtime.errors import PEER_AWAY, RemoteError
from treadle_runtime.server import OPTIONS

FOUND_S = 20.0
"""A ping every five seconds, five for its answer, and a busy machine."""


class Slow(rpc.ExperienceServiceServicer):
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def GetRun(self, request, context):
        self.asked.set()
        await self.answer.wait()
        return pb.GetRunResponse(position=1)


@contextlib.asynccontextmanager
async def asked(tmp_path):
    """A call that is on its way over a link, its server, and the link."""
    slow, server = Slow(), grpc.aio.server(options=OPTIONS)
    rpc.add_ExperienceServiceServicer_to_server(slow, server)
    server.add_insecure_port(f"unix:{tmp_path}/out")
    await server.start()
    link = Link("link", f"unix:{tmp_path}/in", f"unix:{tmp_path}/out")
    proxy = await listen(link)
    async with connect(link.listen) as channel:
        stub = rpc.ExperienceServiceStub(channel)
        asking = asyncio.ensure_future(call(stub.GetRun, pb.GetRunRequest(), timeout_s=100))
        await asyncio.wait_for(slow.asked.wait(), 10)
        yield asking, slow, link
    proxy.close()
    slow.answer.set()
    await server.stop(None)
    link.set("none")
    async with asyncio.timeout(FOUND_S):
        while link.connections:  # noqa: ASYNC110, what they leave is no later test's
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.01)


async def test_a_call_to_a_host_that_is_gone_ends_as_a_peer_that_is_away(tmp_path) -> None:
    async with asked(tmp_path) as (asking, _, link):
        link.set("hole")
        began = time.monotonic()
        with pytest.raises(RemoteError) as away:
            await asyncio.wait_for(asking, FOUND_S)

    assert away.value.reason == PEER_AWAY
    assert time.monotonic() - began < FOUND_S


async def test_a_call_that_is_only_slow_is_not_ended(tmp_path) -> None:
    async with asked(tmp_path) as (asking, slow, _):
        await asyncio.wait([asking], timeout=FOUND_S)  # four pings without any other traffic
        assert not asking.done()
        slow.answer.set()

        assert (await asyncio.wait_for(asking, 10)).position == 1
