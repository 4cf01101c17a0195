"""Experience `memory`: issues tickets to one replica, and forgets all when the process ends."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from treadle_core.errors import Kind
from treadle_core.tickets import Ticket
from treadle_rollout.ports import Attempt, Failure, Lease, Result
from treadle_runtime.errors import RemoteError


@dataclass(slots=True)
class MemoryExperience:
    """Issues the tickets that it is given, again after failures, until all have ended.

    For trying agents without a ledger, and for tests: it keeps every call.
    """

    tickets: Iterable[Ticket]
    lease_s: float = 10.0
    retries: int = 2
    """Failed attempts of an episode that are issued again."""
    results: dict[str, Result] = field(default_factory=dict[str, Result], init=False)
    """By episode."""
    failures: list[tuple[Attempt, Failure]] = field(
        default_factory=list[tuple[Attempt, Failure]], init=False
    )
    handed_back: list[Attempt] = field(default_factory=list[Attempt], init=False)
    revoke: set[Attempt] = field(default_factory=set[Attempt], init=False)
    """What the next renewal takes away."""
    renewals: int = field(default=0, init=False)
    complete_calls: int = field(default=0, init=False)
    refusals: "deque[RemoteError]" = field(default_factory=deque[RemoteError], init=False)
    """Raised, one a call, by the next calls that report an attempt."""
    _pending: "deque[Ticket]" = field(init=False)
    _leased: dict[str, Ticket] = field(default_factory=dict[str, Ticket], init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def __post_init__(self) -> None:
        """Queues the tickets."""
        self._pending = deque(self.tickets)

    async def lease(
        self, *, served_version: int, max_tickets: int, slots: int, wait_s: float
    ) -> Lease:
        if not served_version:
            await asyncio.sleep(wait_s)
            return Lease((), self.lease_s, complete=not self._pending and not self._leased)
        if not self._pending and self._leased:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        tickets: list[Ticket] = []
        while self._pending and len(tickets) < max_tickets:
            ticket = self._pending.popleft()
            self._leased[ticket.episode_id] = ticket
            tickets.append(ticket)
        return Lease(tuple(tickets), self.lease_s, complete=not tickets and not self._leased)

    async def renew(
        self, attempts: Sequence[Attempt], *, served_version: int, timeout_s: float
    ) -> Sequence[Attempt]:
        self.renewals += 1
        revoked = [attempt for attempt in attempts if attempt in self.revoke]
        for attempt in revoked:
            self.revoke.discard(attempt)
            self._issue_again(attempt)
        return revoked

    async def complete(self, attempt: Attempt, result: Result) -> None:
        self.complete_calls += 1
        known = self.results.get(attempt.episode_id)
        if known is not None:
            if known.payload.sha256 != result.payload.sha256:
                raise RemoteError(Kind.CONFLICT, "RESULT_CONFLICT", "recorded with other content")
            return
        self._check(attempt)
        self.results[attempt.episode_id] = result
        self._end(attempt)
        self._refuse()

    async def fail(self, attempt: Attempt, failure: Failure) -> None:
        self._check(attempt)
        self._refuse()
        self.failures.append((attempt, failure))
        if attempt.number <= self.retries:
            self._issue_again(attempt)
        self._end(attempt)

    async def hand_back(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            self.handed_back.append(attempt)
            self._issue_again(attempt)

    def _refuse(self) -> None:
        """After the recording: what is refused here was an answer that got lost."""
        if self.refusals:
            raise self.refusals.popleft()

    def _check(self, attempt: Attempt) -> None:
        ticket = self._leased.get(attempt.episode_id)
        if ticket is None or ticket.attempt != attempt.number:
            raise RemoteError(Kind.PRECONDITION, "STALE_ATTEMPT", "a newer attempt was issued")

    def _issue_again(self, attempt: Attempt) -> None:
        ticket = self._leased.pop(attempt.episode_id, None)
        if ticket is not None:
            self._pending.append(replace(ticket, attempt=attempt.number + 1))
            self._changed.set()

    def _end(self, attempt: Attempt) -> None:
        self._leased.pop(attempt.episode_id, None)
        self._changed.set()
