"""One agent worker as the replica sees it: a process, and the episodes on it."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_agents.images.placeholders import Shown
from treadle_agents.loop import Outcome
from treadle_agents.record import Generated
from treadle_core.episodes import FailureClass
from treadle_rollout.adapters.capped_log import CappedLog
from treadle_rollout.frames import (
    FRAMING,
    AgentKind,
    Say,
    context_to_json,
    failure_of,
    kind_of,
    outcome_of,
    shown_of,
)
from treadle_rollout.ports import AgentsLostError, Job
from treadle_runtime.workers.framing import FrameError
from treadle_runtime.workers.process import WorkerProcess

CLOSE_S = 30.0
"""Most seconds that an environment may take to close."""

Extend = Callable[[Shown], Awaitable[Generated]]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker is told."""

    tokenizer: Path
    """tokenizer.json of the policy."""
    agent: str
    """Name of the agent plugin."""
    parameters: Mapping[str, Any]
    """Of its constructor; JSON."""
    places: int
    """Episodes that one worker hosts."""
    log: Path
    """File that its output goes to."""
    cancel_s: float = 2.0
    """Seconds that an agent has for ending after its deadline, before its worker is killed."""


@dataclass(slots=True, eq=False)
class _Place:
    """One episode on a worker, from PLAY to CLOSED."""

    inbox: "asyncio.Queue[tuple[Say, list[Any]]]"
    task: "asyncio.Task[Any] | None"
    """Plays the episode."""
    lost: Exception | None = None
    """Why there is no worker any more."""
    sampling: bool = False
    """The policy has the turn; the agent waits."""
    over: bool = False
    """The agent has ended the episode and closes."""
    left: bool = False
    """Nobody reads the inbox any more."""
    reaper: asyncio.TimerHandle | None = None
    """Kills the worker unless the episode is closed in time."""


class AgentWorker(WorkerProcess[Say]):
    """A worker. Make one with `start`."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__("agent worker", ("-m", "treadle_rollout.worker"), FRAMING)
        self._settings = settings
        self._places: dict[int, _Place] = {}
        self._keys = count()
        self._log = CappedLog(settings.log)
        self._culprit_known = False
        self.kind = AgentKind.ENV
        """Of the agents that it makes."""

    @classmethod
    async def start(cls, settings: WorkerSettings) -> "AgentWorker":
        """Starts a process and waits until it can play. Raises WorkerStartError."""
        worker = cls(settings)
        await worker.begin(
            await worker._log.open(),
            Say.START,
            str(settings.tokenizer),
            settings.agent,
            json.dumps(dict(settings.parameters)),
            settings.places,
        )
        return worker

    @property
    def free(self) -> int:
        """Episodes that could start while it is alive."""
        return self._settings.places - len(self._places)

    async def play(self, job: Job, extend: Extend) -> Outcome:
        """As Agents.play."""
        task = json.dumps(dict(job.task))
        images = None if job.images is None else asdict(job.images)
        frame = Say.PLAY, task, job.max_context, job.max_turns, images
        return await self._episode(job.deadline_s, extend, *frame)

    async def converse(self, context: ChatContext) -> Outcome:
        """As Agents.converse."""
        return await self._episode(
            context.deadline_s, _nobody, Say.CONVERSE, context_to_json(context)
        )

    async def _episode(self, deadline_s: float, extend: Extend, say: Say, *fields: Any) -> Outcome:
        """Sends what begins an episode, and answers the agent until it ends."""
        key, place = next(self._keys), _Place(asyncio.Queue(maxsize=4), asyncio.current_task())
        self._places[key] = place
        self.packer.send(say, key, *fields)
        grace_s = deadline_s  # an attempt that was revoked costs its neighbours nothing
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                while True:
                    heard, said = await self._next(place)
                    if heard is Say.ENDED:
                        grace_s = CLOSE_S
                        return outcome_of(said)
                    sampled = await extend(shown_of(said))
                    place.sampling = False
                    ids = sampled.token_ids.astype("<i4", copy=False)
                    self.packer.send(Say.SAMPLED, key, ids.tobytes(), sampled.length)
        except EpisodeError:
            grace_s = CLOSE_S
            raise
        except asyncio.CancelledError:
            if place.lost is None or place.task is None or place.task.uncancel():
                raise
            raise place.lost from None
        except TimeoutError:
            if not deadline.expired():
                raise
            grace_s = self._settings.cancel_s
            raise _hung(deadline_s, sampling=place.sampling) from None
        finally:
            self._leave(key, place, grace_s)

    async def stop(self) -> None:
        self._culprit_known = True
        await super().stop()

    async def gone(self, cause: str) -> None:
        await self._log.close()
        for key in list(self._places):
            self._lose(key, cause)

    def _lose(self, key: int, cause: str) -> None:
        """An agent that was not at work when its worker ended has not ended it."""
        place = self._places[key]
        self._close(key)
        if place.left or place.over or place.task is None:
            return
        if place.sampling or self._culprit_known:
            place.lost = AgentsLostError(cause)
        else:
            place.lost = EpisodeError(
                FailureClass.INFRASTRUCTURE,
                f"the agent worker ended while this agent was at work: {cause}",
            )
        place.task.cancel()

    async def _next(self, place: _Place) -> tuple[Say, list[Any]]:
        """The next EXTEND or ENDED. Raises what the episode failed with."""
        say, fields = await place.inbox.get()
        if say not in (Say.EXTEND, Say.ENDED):
            raise failure_of(fields)
        return say, fields

    def _leave(self, key: int, place: _Place, grace_s: float) -> None:
        """Ends an episode on the worker, which keeps its place until it is closed."""
        place.left = True
        if key in self._places:
            if not place.over:
                self.packer.send(Say.CANCEL, key)
            loop = asyncio.get_running_loop()
            cause = f"an agent did not end within {grace_s:g} s"
            place.reaper = loop.call_later(grace_s, self._kill_culprit, cause)

    def _close(self, key: int) -> None:
        place = self._places.pop(key)
        if place.reaper is not None:
            place.reaper.cancel()

    def hear(self, say: Say, fields: list[Any]) -> None:
        if say is Say.READY:
            self.kind = kind_of(fields)
            self.ready()
            return
        if say is Say.REFUSED:
            self.refuse(failure_of([FailureClass.ENVIRONMENT, *fields]).message)
            return
        key = fields[0] if fields and isinstance(fields[0], int) else -1
        place = self._places.get(key)
        if place is None:
            raise FrameError(limit="an episode that is here", value=f"{say.name} of another")
        if say is Say.CLOSED:
            self._close(key)
        place.over = place.over or say is not Say.EXTEND
        place.sampling = say is Say.EXTEND
        if not place.left:
            place.inbox.put_nowait((say, fields[1:]))

    def _kill_culprit(self, cause: str) -> None:
        """Kills for what is not the fault of the episodes that are still read."""
        self._culprit_known = True
        self.kill(cause)


async def _nobody(observed: Shown) -> Generated:
    raise EpisodeError(FailureClass.ENVIRONMENT, "the agent worker: expected no token ids")


def _hung(deadline_s: float, *, sampling: bool) -> EpisodeError:
    if sampling:
        message = f"the deadline of {deadline_s:g} s passed while the policy sampled"
        return EpisodeError(FailureClass.INFRASTRUCTURE, message)
    return EpisodeError(FailureClass.ENVIRONMENT, f"the agent hung: no answer in {deadline_s:g} s")
