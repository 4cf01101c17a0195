"""The ticket loop: leases what there is room for, renews what runs, and hands the rest back."""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from treadle_core.errors import Kind, TreadleError
from treadle_core.tickets import Ticket
from treadle_rollout.attempts import AttemptRunner
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.core.results import Verdict, verdict
from treadle_rollout.ports import Attempt, Engine, Experience, Lease
from treadle_runtime.doorbell import SWEEP_S, Doorbell, Topic
from treadle_runtime.failpoints import failpoint

log = logging.getLogger(__name__)

_POLL_S = 0.05
"""How often a replica looks whether it may lease: a slot or a worker back."""
_COALESCE_S = 0.01
"""Pause after tickets came: slots that become free at about the same time share one call."""
_AWAY_S = 0.5
"""Pause after the ledger refused or was not reached."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How tickets are leased."""

    slots: int
    wait_s: float = 0.25
    """How long a call waits for a ticket. Short, because it asks under the version that was served
    when it began: one installed meanwhile may open the window, and a drain waits for it too."""
    grace_s: float = 20.0
    """Seconds that running episodes get when the replica drains."""


class Replica:
    """Keeps the slots of one engine filled."""

    def __init__(
        self,
        settings: ReplicaSettings,
        *,
        experience: Experience,
        bell: Doorbell,
        engine: Engine,
        runner: AttemptRunner,
        state: ReplicaState,
    ) -> None:
        """`bell` hears of tickets; `state` is read by others, and written by the runner too."""
        self._settings = settings
        self._experience = experience
        self._bell = bell
        self._engine = engine
        self._runner = runner
        self._state = state
        self._tasks: dict[Attempt, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._lease_s = 0.0
        self._ended = asyncio.Event()
        self._refusal = ""

    async def run(self) -> None:
        """Runs episodes until the ledger has no more, or `drain` was called.

        A replica that serves nothing yet asks too: no version may ever come to a complete run.

        Raises TreadleError when the ledger is another run's, or the engine is broken.
        """
        try:
            async with asyncio.TaskGroup() as group:
                beat = group.create_task(self._heartbeat())
                await self._lease_until_done(group)
                if self._tasks:
                    await asyncio.wait(self._tasks.values())
                beat.cancel()
        finally:
            self._ended.set()

    async def drain(self) -> None:
        """Leases nothing more, lets episodes end within the grace, hands the others back."""
        self._state.draining = True
        self._changed.set()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=self._settings.grace_s)
        left = dict(self._tasks)
        for task in left.values():
            task.cancel()
        if left:
            await asyncio.wait(left.values())
            await self._hand_back(list(left))
        await self._ended.wait()

    async def _lease_until_done(self, group: asyncio.TaskGroup) -> None:
        while not self._state.draining:
            room = self._room
            if not room:
                await self._wait_for_change()
                continue
            lease = await self._lease(room)
            if lease is None:
                await asyncio.sleep(_AWAY_S)
                continue
            if lease.complete:
                return
            failpoint("rollout.lease.after_tickets")
            self._lease_s = lease.lease_s
            if self._state.draining:
                await self._hand_back([Attempt(t.episode_id, t.attempt) for t in lease.tickets])
                return
            for ticket in lease.tickets:
                self._start(group, ticket)
            await asyncio.sleep(_COALESCE_S)

    async def _lease(self, room: int) -> Lease | None:
        """None when the ledger gave no answer that helps now."""
        clock = asyncio.get_running_loop().time
        version, live = self._engine.served_version, self._bell.is_live
        self._state.begin_wait(clock())
        try:
            lease = await self._experience.lease(
                served_version=version,
                max_tickets=room,
                slots=self._settings.slots,
                wait_s=0.0 if live else self._settings.wait_s,
            )
            if live and not (lease.tickets or lease.complete):
                await self._until_rung(version, room)
        except TreadleError as error:
            if verdict(error) is Verdict.END or error.kind is Kind.INVALID:
                raise
            self._note_refusal(error)
            return None
        finally:
            self._state.end_wait(clock())
        self._refusal = ""
        return lease

    async def _until_rung(self, version: int, room: int) -> None:
        """Waits until asking again may help: a ring, the sweep, or a change of this replica."""
        ring = asyncio.ensure_future(self._bell.wait(Topic.TICKETS, SWEEP_S))
        try:
            while not (ring.done() or self._state.draining):
                if (self._engine.served_version, self._room) != (version, room):
                    return
                await asyncio.wait({ring}, timeout=_POLL_S)
        finally:
            ring.cancel()

    @property
    def _room(self) -> int:
        return min(self._state.free, self._runner.player.free)

    def _start(self, group: asyncio.TaskGroup, ticket: Ticket) -> None:
        attempt = Attempt(ticket.episode_id, ticket.attempt)
        self._cancel(self._state.start(attempt))
        self._tasks[attempt] = group.create_task(self._attempt(attempt, ticket))

    async def _attempt(self, attempt: Attempt, ticket: Ticket) -> None:
        ended = "stopped"
        try:
            ended = await self._runner.run(ticket)
        finally:
            self._state.end(attempt, ended)
            del self._tasks[attempt]
            self._changed.set()

    async def _heartbeat(self) -> None:
        """Renews leases, whatever the episodes do."""
        while True:
            await asyncio.sleep(self._lease_s / 3 or _POLL_S)
            if not self._lease_s:
                continue
            try:
                revoked = await self._experience.renew(
                    self._state.running,
                    served_version=self._engine.served_version,
                    timeout_s=self._lease_s / 3,
                )
            except TreadleError as error:
                if verdict(error) is Verdict.END:
                    raise
                self._note_refusal(error)
            else:
                self._cancel(self._state.revoked(revoked))

    def _cancel(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            log.info("attempt %d at %s is revoked", attempt.number, attempt.episode_id)
            self._tasks[attempt].cancel()

    async def _hand_back(self, attempts: Sequence[Attempt]) -> None:
        """Once: what is not handed back expires."""
        try:
            await self._experience.hand_back(attempts)
        except TreadleError as error:
            self._note_refusal(error)
        else:
            self._state.counts["handed_back"] += len(attempts)

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await self._changed.wait()

    def _note_refusal(self, error: TreadleError) -> None:
        """Logs a refusal when it is news."""
        if error.reason != self._refusal:
            self._refusal = error.reason
            log.warning("experience: %s: %s", error.reason, error.message)
