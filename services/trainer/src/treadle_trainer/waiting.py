"""Waiting that does not go unnoticed, and ends cleanly."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from treadle_runtime.tracker import Tracker

log = logging.getLogger(__name__)

T = TypeVar("T")


class Alarm:
    """Says, loudly and again and again, that nothing has come for a stated time."""

    def __init__(self, every_s: float, tracker: Tracker) -> None:
        self._every_s = every_s
        self._tracker = tracker

    async def over(self, waiting: Coroutine[Any, Any, T], what: str, *, step: int) -> T:
        """Awaits `waiting`, which brings `what` after the trained `step`; an alarm each `every_s`.

        An alarm is a line in the log and a row `no_progress`; it ends nothing.
        """
        waiter, waited_s = asyncio.ensure_future(waiting), 0.0
        try:
            while True:
                await asyncio.wait({waiter}, timeout=self._every_s)
                if waiter.done():
                    return waiter.result()
                waited_s += self._every_s
                log.critical(
                    "no progress: after step %d, %s has not come for %.0f s", step, what, waited_s
                )
                self._tracker.log("no_progress", {"step": step, "waited_s": waited_s})
        finally:
            await cancel(waiter)


async def cancel(*tasks: "asyncio.Future[Any]") -> None:
    """Cancels what still runs, and waits until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
