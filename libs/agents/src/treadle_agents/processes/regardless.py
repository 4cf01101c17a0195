"""Work that is brought to its end also when nobody wants its result any more."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def regardless(work: Awaitable[T]) -> T:
    """Awaits `work` to its end, and only then lets this task be cancelled."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and future.exception() is None:
        raise cancelled
    return future.result()
