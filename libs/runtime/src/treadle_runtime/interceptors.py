"""What every served call passes through: a deadline, and typed errors."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from treadle_core.errors import Kind, TreadleError
from treadle_runtime import errors

log = logging.getLogger(__name__)

DEADLINE_CAP_S = 60.0
"""Deadline of a call that brings none."""

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
        return grpc.unary_unary_rpc_method_handler(
            self._guard(handler.unary_unary, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guard(self, behaviour: Handler, method: str) -> Handler:
        async def guarded(request: Any, context: Any) -> Any:
            remaining = context.time_remaining()
            limit = DEADLINE_CAP_S if remaining is None else min(remaining, 3600.0)
            try:
                async with asyncio.timeout(limit):
                    return await behaviour(request, context)
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
