"""Agents of the house: worker processes, started again when they end."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from treadle_agents.chat_agent import ChatContext
from treadle_agents.images.placeholders import Shown
from treadle_agents.loop import Outcome
from treadle_agents.record import Generated
from treadle_rollout.adapters.worker_process import AgentWorker, WorkerSettings
from treadle_rollout.frames import AgentKind
from treadle_rollout.ports import AgentsLostError, Job
from treadle_runtime.workers.pool import WorkerPool


class AgentPool(WorkerPool[AgentWorker]):
    """Agents in processes of their own. `start` it, then `run` it beside the episodes."""

    def __init__(self, settings: WorkerSettings, workers: int) -> None:
        """Each of the `workers` logs to a file of its own beside `settings.log`."""
        super().__init__(workers)
        log_of = settings.log.with_name
        self._settings = [
            replace(settings, log=log_of(f"{settings.log.stem}-{i}{settings.log.suffix}"))
            for i in range(workers)
        ]
        self.kind = AgentKind.ENV
        """Of its agents, once it was started."""

    async def start_worker(self, place: int) -> AgentWorker:
        worker = await AgentWorker.start(self._settings[place])
        self.kind = worker.kind
        return worker

    @property
    def free(self) -> int:
        """Episodes that could start now."""
        return sum(worker.free for worker in self.live)

    async def play(self, job: Job, extend: Callable[[Shown], Awaitable[Generated]]) -> Outcome:
        """As Agents.play, on the worker with most places free."""
        return await self._freest().play(job, extend)

    async def converse(self, context: ChatContext) -> Outcome:
        """As Agents.converse, on the worker with most places free."""
        return await self._freest().converse(context)

    def _freest(self) -> AgentWorker:
        worker = max(self.live, key=lambda live: live.free, default=None)
        if worker is None or not worker.free:
            raise AgentsLostError("no agent worker has a place")
        return worker
