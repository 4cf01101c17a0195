"""Workers that are started again when they end."""

import abc
import asyncio
import logging
from typing import Any, Generic, TypeVar

from treadle_runtime.workers.process import WorkerProcess, WorkerStartError

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.2
"""Pause before a worker is started again; doubled with each that did not live."""
LONGEST_DELAY_S = 10.0
LIVED_S = 30.0
"""A worker that lived so long starts the pauses anew."""
STARTS = 5
"""Starts in a row that may fail before the pool gives up."""

WorkerT = TypeVar("WorkerT", bound=WorkerProcess[Any])


class WorkerPool(abc.ABC, Generic[WorkerT]):
    """As many workers as it has places. `start` it, then `run` it beside what they are for."""

    def __init__(self, places: int) -> None:
        self._workers: list[WorkerT | None] = [None] * places
        self.restarts = 0
        """Workers that ended and were started again."""

    @abc.abstractmethod
    async def start_worker(self, place: int) -> WorkerT:
        """Starts a worker for a place, counted from 0. Raises WorkerStartError."""

    async def start(self) -> None:
        """Starts every worker. Raises WorkerStartError where one cannot be."""
        started = await asyncio.gather(
            *map(self.start_worker, range(len(self._workers))), return_exceptions=True
        )
        self._workers = [None if isinstance(each, BaseException) else each for each in started]
        for failed in started:
            if isinstance(failed, BaseException):
                await self.close()
                raise failed

    async def run(self) -> None:
        """Starts workers again when they end; runs until cancelled, then stops them.

        Raises WorkerStartError, in a group, when one cannot be started STARTS times in a row.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(len(self._workers)):
                    group.create_task(self._keep(place))
        finally:
            await self.close()

    async def close(self) -> None:
        """Stops all workers, and what they started."""
        await asyncio.gather(*(worker.stop() for worker in self._workers if worker is not None))

    @property
    def live(self) -> list[WorkerT]:
        """The workers that can be talked to."""
        return [worker for worker in self._workers if worker is not None and worker.alive]

    async def _keep(self, place: int) -> None:
        loop = asyncio.get_running_loop()
        delay_s, refused = FIRST_DELAY_S, 0
        while True:
            worker = self._workers[place]
            if worker is not None:
                since = loop.time()
                await worker.ended.wait()
                if loop.time() - since > LIVED_S:
                    delay_s = FIRST_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            try:
                self._workers[place] = await self.start_worker(place)
            except WorkerStartError:
                self._workers[place] = None
                refused += 1
                if refused >= STARTS:
                    raise
                log.exception("%s: worker %d did not start", type(self).__name__, place)
            else:
                refused = 0
                self.restarts += 1
                log.warning(
                    "%s: worker %d ended, and was started again", type(self).__name__, place
                )
