"""Agents of the house: worker processes, started again when they end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from treadle_agents.chat_agent import ChatContext
from treadle_agents.loop import Outcome
from treadle_agents.record import Generated
from treadle_rollout.adapters.worker_process import WorkerProcess, WorkerSettings, WorkerStartError
from treadle_rollout.frames import AgentKind
from treadle_rollout.ports import AgentsLostError, Job

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.2
"""Pause before a worker is started again; doubled with each that did not live."""
LONGEST_DELAY_S = 10.0
LIVED_S = 30.0
"""A worker that lived so long starts the pauses anew."""
STARTS = 5
"""Starts in a row that may fail before the pool gives up."""


class WorkerPool:
    """Agents in processes of their own. `start` it, then `run` it beside the episodes."""

    def __init__(self, settings: WorkerSettings, workers: int) -> None:
        """Each of the `workers` logs to a file of its own beside `settings.log`."""
        log_of = settings.log.with_name
        self._settings = [
            replace(settings, log=log_of(f"{settings.log.stem}-{i}{settings.log.suffix}"))
            for i in range(workers)
        ]
        self._workers: list[WorkerProcess | None] = [None] * workers
        self.restarts = 0
        """Workers that ended and were started again."""

    async def start(self) -> None:
        """Starts every worker. Raises WorkerStartError where one cannot play."""
        started = await asyncio.gather(
            *map(WorkerProcess.start, self._settings), return_exceptions=True
        )
        self._workers = [s if isinstance(s, WorkerProcess) else None for s in started]
        for failed in started:
            if isinstance(failed, BaseException):
                await self.close()
                raise failed

    async def run(self) -> None:
        """Starts workers again when they end; runs until cancelled, then stops them.

        Raises WorkerStartError when one cannot be started STARTS times in a row.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for index in range(len(self._workers)):
                    group.create_task(self._keep(index))
        finally:
            await self.close()

    async def close(self) -> None:
        """Stops all workers and what their agents started."""
        running = [worker for worker in self._workers if worker is not None]
        await asyncio.gather(*(worker.stop() for worker in running))

    @property
    def kind(self) -> AgentKind:
        """Of its agents, once it was started."""
        return next((worker.kind for worker in self._live()), AgentKind.ENV)

    @property
    def free(self) -> int:
        """Episodes that could start now."""
        return sum(worker.free for worker in self._live())

    async def play(
        self, job: Job, extend: Callable[[NDArray[np.int32]], Awaitable[Generated]]
    ) -> Outcome:
        """As Agents.play, on the worker with most places free."""
        return await self._freest().play(job, extend)

    async def converse(self, context: ChatContext) -> Outcome:
        """As Agents.converse, on the worker with most places free."""
        return await self._freest().converse(context)

    def _freest(self) -> WorkerProcess:
        worker = max(self._live(), key=lambda live: live.free, default=None)
        if worker is None or not worker.free:
            raise AgentsLostError("no agent worker has a place")
        return worker

    def _live(self) -> Sequence[WorkerProcess]:
        return [worker for worker in self._workers if worker is not None]

    async def _keep(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        delay_s, refused = FIRST_DELAY_S, 0
        while True:
            worker = self._workers[index]
            if worker is not None:
                since = loop.time()
                await worker.ended.wait()
                if loop.time() - since > LIVED_S:
                    delay_s = FIRST_DELAY_S
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            try:
                self._workers[index] = await WorkerProcess.start(self._settings[index])
            except WorkerStartError:
                self._workers[index] = None
                refused += 1
                if refused >= STARTS:
                    raise
                log.exception("an agent worker did not start")
            else:
                refused = 0
                self.restarts += 1
                log.warning("an agent worker ended and was started again")
