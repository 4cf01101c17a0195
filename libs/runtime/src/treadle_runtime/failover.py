"""A channel to a service that one of several processes serves, each at an address of its own.

Calls go to one address until it does not answer, or says that it was followed; then to the next. A
process that stands still keeps its connections, and looks like a slow one: a call that takes long
asks whether another address serves by now, which only a successor does.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_LOOK_S = 1.0
"""How long a call takes before the other addresses are asked, and how often they are."""

_NEXT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_FENCED = "WRITER_FENCED"
_DETAILS = "grpc-status-details-bin"
"""What a service that was reached says more than a status in."""


class FailoverChannel(grpc.aio.Channel):
    """Calls that are answered once, over several channels. Streams stay with the first that serves.

    A call that an address does not take is made once at each other one before it is the caller's
    to repeat; one that another address is found to serve by now is made again there. So a keyed
    mutation may execute twice.
    """

    def __init__(self, channels: Sequence[grpc.aio.Channel]) -> None:
        self._channels = channels
        self._healths: list[Any] = [health_pb2_grpc.HealthStub(each) for each in channels]
        self._looked = 0.0
        self.current = 0
        """Place of the address that is called now."""

    def unary_unary(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, method: str, *arguments: Any, **options: Any
    ) -> Any:
        calls = [each.unary_unary(method, *arguments, **options) for each in self._channels]
        return _Method(self, calls)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._channels[self.current].unary_stream(*arguments, **options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._channels[self.current].stream_unary(*arguments, **options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._channels[self.current].stream_stream(*arguments, **options)

    def leave(self, place: int) -> None:
        """Calls go to the next address, unless they left this one already."""
        if self.current == place:
            self.current = (place + 1) % len(self._channels)

    async def look(self, place: int) -> bool:
        """Whether calls go elsewhere than to `place` by now; asks the others now and then."""
        now = time.monotonic()
        if self.current == place and now - self._looked >= _LOOK_S:
            self._looked = now
            for other in (each for each in range(len(self._channels)) if each != place):
                if await self._serves(other):
                    self.current = other
                    break
        return self.current != place

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(each.close(grace) for each in self._channels))

    async def __aenter__(self) -> "FailoverChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002
        return self._channels[self.current].get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channels[self.current].wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channels[self.current].channel_ready()

    async def _serves(self, place: int) -> bool:
        request = health_pb2.HealthCheckRequest()
        try:
            said = await self._healths[place].Check(request, timeout=_LOOK_S)
        except grpc.aio.AioRpcError:
            return False
        return said.status == health_pb2.HealthCheckResponse.SERVING


class _Method:
    """One method, on whichever address is called."""

    def __init__(self, channel: FailoverChannel, calls: Sequence[Callable[..., Any]]) -> None:
        self._channel = channel
        self._calls = calls

    async def __call__(self, request: Any, *, timeout: float | None = None, **options: Any) -> Any:
        until = None if timeout is None else time.monotonic() + timeout
        refused = 0
        while True:
            place = self._channel.current
            left_s = None if until is None else max(0.0, until - time.monotonic())
            call = self._calls[place](request, timeout=left_s, **options)
            running = asyncio.ensure_future(_answer(call))
            try:
                while not (await asyncio.wait({running}, timeout=_LOOK_S))[0]:
                    if await self._channel.look(place):
                        break
                else:
                    return running.result()
            except grpc.aio.AioRpcError as error:
                said = str(error.trailing_metadata())
                if error.code() in _NEXT or _FENCED in said:
                    self._channel.leave(place)
                refused += 1
                nobody = error.code() is grpc.StatusCode.UNAVAILABLE and _DETAILS not in said
                if not nobody or refused == len(self._calls):
                    raise
            finally:
                running.cancel()


async def _answer(call: Any) -> Any:
    return await call
