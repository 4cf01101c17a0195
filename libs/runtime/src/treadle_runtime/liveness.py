"""Whether a service that has answered once still answers."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle_runtime.channel import connect

_LOOKS = 12
"""Looks in the time after which a silent service hangs."""
_SILENCE = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE}


async def until_hung(address: str, hung_s: float, on_answer: Callable[[], None]) -> None:
    """Returns when the service at `address` has not answered for `hung_s` seconds.

    It is asked for its health, on its event loop; whatever it says is a sign of life, and told.
    """
    async with connect(address) as channel:
        health = cast("Any", health_pb2_grpc).HealthStub(channel)
        await until_silent(partial(_answers, health), hung_s, on_answer)


async def until_silent(
    answers: Callable[[float], Awaitable[bool]], hung_s: float, on_answer: Callable[[], None]
) -> None:
    """Returns when `answers`, given the seconds that it has, was False for `hung_s` seconds.

    What has never answered is starting, however long. Silence is counted in looks, so that it is
    none when we stood still ourselves.
    """
    look_s = hung_s / _LOOKS
    silent: int | None = None
    while silent is None or silent < _LOOKS:
        answered, _ = await asyncio.gather(answers(look_s), asyncio.sleep(look_s))
        if answered:
            on_answer()
            silent = 0
        elif silent is not None:
            silent += 1


async def _answers(health: Any, timeout_s: float) -> bool:
    request = health_pb2.HealthCheckRequest()
    try:
        await health.Check(request, timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        return error.code() not in _SILENCE
    return True
