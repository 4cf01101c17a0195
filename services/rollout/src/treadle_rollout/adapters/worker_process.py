"""One agent worker as the replica sees it: a process group, a socket, and the episodes on it."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_agents.loop import Outcome
from treadle_agents.record import Generated
from treadle_core.episodes import FailureClass
from treadle_rollout.adapters.capped_log import CappedLog
from treadle_rollout.frames import (
    AgentKind,
    FrameError,
    Packer,
    Say,
    Unpacker,
    context_to_json,
    failure_of,
    ids_of,
    kind_of,
    outcome_of,
)
from treadle_rollout.ports import AgentsLostError, Job

VISIBLE = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "OMP_NUM_THREADS")
"""Environment variables that agents see; no other, so that they find no credentials."""
START_S = 120.0
"""Most seconds from the start of a worker to its first episode; imports of agents included."""
CLOSE_S = 30.0
"""Most seconds that an environment may take to close."""

Extend = Callable[[NDArray[np.int32]], Awaitable[Generated]]


class WorkerStartError(Exception):
    """A worker could not be started, and what it said."""


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


class WorkerProcess(asyncio.Protocol):
    """A worker. Make one with `start`; it is gone when `ended` is set."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._unpacker = Unpacker()
        self._places: dict[int, _Place] = {}
        self._keys = count()
        self._ready: asyncio.Future[AgentKind] = asyncio.get_running_loop().create_future()
        self._cut = asyncio.Event()
        self._log = CappedLog(settings.log)
        self._killed_because = ""
        self._culprit_known = False
        self.kind = AgentKind.ENV
        """Of the agents that it makes."""
        self.ended = asyncio.Event()
        """The process is gone and its episodes know."""

    @classmethod
    async def start(cls, settings: WorkerSettings) -> "WorkerProcess":
        """Starts a process and waits until it can play.

        Raises WorkerStartError when it refuses, ends or does not come up.
        """
        worker = cls(settings)
        await worker._spawn()
        worker._packer.send(
            Say.START,
            str(settings.tokenizer),
            settings.agent,
            json.dumps(dict(settings.parameters)),
            settings.places,
        )
        try:
            async with asyncio.timeout(START_S):
                worker.kind = await worker._ready
        except BaseException as error:
            await worker.stop()
            if isinstance(error, TimeoutError):
                raise WorkerStartError(f"no agent worker after {START_S:g} s") from error
            raise
        return worker

    @property
    def free(self) -> int:
        """Episodes that could start now."""
        gone = self._cut.is_set() or self._killed_because
        return 0 if gone else self._settings.places - len(self._places)

    async def play(self, job: Job, extend: Extend) -> Outcome:
        """As Agents.play."""
        task = json.dumps(dict(job.task))
        frame = Say.PLAY, task, job.max_context, job.max_turns
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
        self._packer.send(say, key, *fields)
        grace_s = deadline_s  # an attempt that was revoked costs its neighbours nothing
        deadline = asyncio.timeout(deadline_s)
        try:
            async with deadline:
                while True:
                    heard, said = await self._next(place)
                    if heard is Say.ENDED:
                        grace_s = CLOSE_S
                        return outcome_of(said)
                    sampled = await extend(ids_of(said))
                    place.sampling = False
                    ids = sampled.token_ids.astype("<i4", copy=False)
                    self._packer.send(Say.SAMPLED, key, ids.tobytes(), sampled.length)
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
        """Ends the process and all that its agents started."""
        self._kill_culprit("it was stopped")
        await self.ended.wait()

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        output = await self._log.open()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "treadle_rollout.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={name: os.environ[name] for name in VISIBLE if name in os.environ}
                | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        os.close(output)
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self, sock=ours)
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Follows the process to its end, then tells its episodes."""
        cause = "nobody watched it any more"
        try:
            cause = f"exit status {await self._process.wait()}"
            self._kill_group()
            # What it said before it ended may still be on its way.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._cut.wait()
            await self._log.close()
        finally:
            self._kill_group()
            self._transport.abort()
            cause = self._killed_because or cause
            if not self._ready.done():
                self._ready.set_exception(WorkerStartError(f"the agent worker ended: {cause}"))
            for key in list(self._places):
                self._lose(key, cause)
            self.ended.set()

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
                self._packer.send(Say.CANCEL, key)
            loop = asyncio.get_running_loop()
            cause = f"an agent did not end within {grace_s:g} s"
            place.reaper = loop.call_later(grace_s, self._kill_culprit, cause)

    def _close(self, key: int) -> None:
        place = self._places.pop(key)
        if place.reaper is not None:
            place.reaper.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._packer = Packer(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for say, fields in self._unpacker.feed(data):
                self._hear(say, fields)
        except (FrameError, asyncio.QueueFull) as error:
            self._kill(f"it broke the protocol: {error or type(error).__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._cut.set()

    def _hear(self, say: Say, fields: list[Any]) -> None:
        if say is Say.READY:
            if not self._ready.done():
                self._ready.set_result(kind_of(fields))
            return
        if say is Say.REFUSED:
            if not self._ready.done():
                self._ready.set_exception(
                    WorkerStartError(failure_of(["environment", *fields]).message)
                )
            return
        key = fields[0] if fields and isinstance(fields[0], int) else -1
        place = self._places.get(key)
        if place is None:
            raise FrameError(f"{say.name} of an episode that is not here")
        if say is Say.CLOSED:
            self._close(key)
        place.over = place.over or say is not Say.EXTEND
        place.sampling = say is Say.EXTEND
        if not place.left:
            place.inbox.put_nowait((say, fields[1:]))

    def _kill_culprit(self, cause: str) -> None:
        """Kills for what is not the fault of the episodes that are still read."""
        self._culprit_known = True
        self._kill(cause)

    def _kill(self, cause: str) -> None:
        if self.ended.is_set() or self._killed_because:
            return
        self._killed_because = cause
        self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def _nobody(observed: NDArray[np.int32]) -> Generated:
    raise EpisodeError(FailureClass.ENVIRONMENT, "the agent worker: expected no token ids")


def _hung(deadline_s: float, *, sampling: bool) -> EpisodeError:
    if sampling:
        message = f"the deadline of {deadline_s:g} s passed while the policy sampled"
        return EpisodeError(FailureClass.INFRASTRUCTURE, message)
    return EpisodeError(FailureClass.ENVIRONMENT, f"the agent hung: no answer in {deadline_s:g} s")
