"""What every served call passes through: a decoder, a deadline, and typed errors."""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_runtime import errors, last_call

log = logging.getLogger(__name__)

DEADLINE_CAP_S = 60.0
"""Deadline of a call that brings none, or one that is no bound."""
LONGEST_DEADLINE_S = 3600.0
"""What is later than this is no bound."""

CONTRACT = "v1"
"""Of every package that a service serves."""
_METHOD = re.compile(r"/treadle\.\w+\.(?P<contract>v\d+)\.")

Handler = Callable[[Any, Any], Awaitable[Any]]
Streamer = Callable[[Any, Any], AsyncGenerator[Any]]


class OtherContractError(TreadleError):
    """The caller speaks another contract than this service."""

    kind = Kind.PRECONDITION
    reason = "OTHER_CONTRACT"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Bounds each call in time and turns TreadleError into status and ErrorInfo."""

    def __init__(self, domain: str) -> None:
        self._domain = domain

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None and (spoken := _METHOD.match(method)):
            handler = _refusing(spoken["contract"])
        if handler is not None and handler.unary_unary is not None:
            wrap, guarded = grpc.unary_unary_rpc_method_handler, self._guard(handler, method)
        elif handler is not None and handler.unary_stream is not None and _is_ours(method):
            wrap, guarded = (
                grpc.unary_stream_rpc_method_handler,
                self._guard_stream(handler, method),
            )
        else:  # reflection, and who watches our health
            return handler
        return cast("Any", wrap)(guarded, response_serializer=handler.response_serializer)

    def _guard(self, handler: Any, method: str) -> Handler:
        behaviour: Handler = handler.unary_unary

        async def guarded(data: bytes, context: Any) -> Any:
            async with self._bounded(context, method):
                return await behaviour(_decoded(data, handler), context)

        return guarded

    def _guard_stream(self, handler: Any, method: str) -> Streamer:
        behaviour: Streamer = handler.unary_stream

        async def guarded(data: bytes, context: Any) -> AsyncGenerator[Any]:
            async with (
                self._bounded(context, method),
                contextlib.aclosing(behaviour(_decoded(data, handler), context)) as responses,
            ):
                async for response in responses:
                    yield response

        return guarded

    @contextlib.asynccontextmanager
    async def _bounded(self, context: Any, method: str) -> AsyncGenerator[None]:
        """One call: its time is bounded, and what it raises is told."""
        if _is_ours(method):  # who asks for our health does not use us
            last_call.note(f"served {method.rpartition('/')[2]}")
        limit = _limit_s(context.time_remaining())
        try:
            async with asyncio.timeout(limit):
                yield
        except TreadleError as error:
            if error.kind is Kind.BROKEN:
                log.exception("%s: a promise of ours is broken", method)
            await errors.abort(context, error, self._domain)
        except TimeoutError:
            await context.abort(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {limit:.1f} s"
            )
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception:
            log.exception("%s: unexpected error", method)
            await context.abort(grpc.StatusCode.INTERNAL, "unexpected error; see the log")


def _refusing(contract: str) -> Any:
    """The handler of a method that nobody here has; None where that is all that is wrong."""

    async def refuse(_: bytes, __: Any) -> None:
        raise OtherContractError(
            f"the call is of contract {contract}, this service speaks {CONTRACT}",
            field="contract",
            limit=CONTRACT,
            value=contract,
        )

    if contract == CONTRACT:
        return None
    return cast("Any", grpc.unary_unary_rpc_method_handler)(refuse, request_deserializer=bytes)


def _is_ours(method: str) -> bool:
    return not method.startswith("/grpc.")


def _limit_s(remaining: float | None) -> float:
    """Seconds that a call may take, of which its deadline leaves `remaining`; None: it has none."""
    if remaining is None or remaining > LONGEST_DEADLINE_S:
        return DEADLINE_CAP_S
    return remaining


def _decoded(data: bytes, handler: Any) -> Any:
    """The message; here and not in the server, so that bytes that are none get a typed error."""
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        raise InvalidFieldError(
            "request", limit="a message of the contract", value=f"{len(data)} other bytes"
        ) from error
