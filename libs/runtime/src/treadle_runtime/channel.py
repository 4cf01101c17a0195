"""Calls to another service: one deadline a try, a budget for retries, typed errors."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from typing import Any, cast

import grpc
import grpc.aio
from opentelemetry.instrumentation import grpc as grpc_instrumentation

from treadle_core.errors import Kind
from treadle_runtime import errors, last_call
from treadle_runtime.failover import FailoverChannel

log = logging.getLogger(__name__)

MESSAGE_LIMIT = 64 * 1024 * 1024
"""Most bytes of one message; heavier things travel by reference."""

OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 250),
    # A service that comes back elsewhere under its name is found at once, not after 30 s.
    ("grpc.dns_min_time_between_resolutions_ms", 500),
    # A peer whose host is gone sends nothing, and some calls may wait for minutes.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # else 60 s, and the longer of the two counts
    ("grpc.http2.max_pings_without_data", 0),
    # A unix path has no host name to send, and ours may be longer than HTTP/2 likes.
    ("grpc.default_authority", "localhost"),
)
"""Of every channel."""

_AGAIN = (errors.PEER_AWAY, "WRITER_FENCED")
"""Reasons to call again: a process that was fenced has a successor, at the same address."""
_FIRST_DELAY_S = 0.05
_LONGEST_DELAY_S = 2.0


def connect(address: str | Sequence[str]) -> grpc.aio.Channel:
    """Opens a channel, in the open: `unix:/path` or `host:port`. Connects on the first call.

    Of several addresses, one that serves is called (`failover`).
    """
    if not isinstance(address, str):
        return FailoverChannel([connect(each) for each in address])
    return grpc.aio.insecure_channel(
        address,
        options=OPTIONS,
        interceptors=[
            *cast("Any", grpc_instrumentation).aio_client_interceptors(),
            _Cancelling(),
        ],
    )


class _Cancelling(grpc.aio.UnaryUnaryClientInterceptor):
    """Ends a call whose caller gives up; tracing waits for its status, and leaves it behind."""

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        call = await continuation(client_call_details, request)
        try:
            await call.code()
        except asyncio.CancelledError:
            call.cancel()
            raise
        return call


async def call(
    method: Any, request: Any, *, timeout_s: float, budget_s: float = 0.0, patient: bool = False
) -> Any:
    """Calls `method` of a stub, with `timeout_s` for each try.

    A peer that is away, or was replaced, is tried again with growing, jittered delays until
    `budget_s` seconds are spent, so a keyed mutation may execute several times. A `patient` caller
    is also there when a peer that has no room (EXHAUSTED, with the time after which to ask again)
    has some, however long that takes.

    Raises:
        RemoteError: as the peer sent it; reason PEER_AWAY when it was not reached in the budget.
    """
    give_up = time.monotonic() + budget_s
    delay_s = _FIRST_DELAY_S
    told = False
    name = type(request).__name__
    while True:
        last_call.note(f"called {name.removesuffix('Request')}")
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            remote = errors.from_rpc_error(error, name)
            if patient and remote.kind is Kind.EXHAUSTED and remote.retry_after_s is not None:
                if not told:
                    log.warning("waiting for room: %s: %s", remote.reason, remote.message)
                told, delay_s = True, remote.retry_after_s
                give_up = time.monotonic() + budget_s
            elif remote.reason not in _AGAIN or time.monotonic() + delay_s > give_up:
                raise remote from error
        await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311, jitter
        delay_s = min(delay_s * 2, _LONGEST_DELAY_S)
