"""What every served call passes through: a decoder, a deadline, and typed errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
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

Handler = Callable[[Any, Any], Awaitable[Any]]


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
        if handler is None or handler.unary_unary is None:  # reflection and health watch stream
            return handler
        return cast("Any", grpc.unary_unary_rpc_method_handler)(
            self._guard(handler, handler_call_details.method),
            response_serializer=handler.response_serializer,
        )

    def _guard(self, handler: Any, method: str) -> Handler:
        name = method.rpartition("/")[2]
        behaviour: Handler = handler.unary_unary

        async def guarded(data: bytes, context: Any) -> Any:
            if not method.startswith("/grpc."):  # who asks for our health does not use us
                last_call.note(f"served {name}")
            limit = _limit_s(context.time_remaining())
            try:
                async with asyncio.timeout(limit):
                    return await behaviour(_decoded(data, handler), context)
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

        return guarded


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
