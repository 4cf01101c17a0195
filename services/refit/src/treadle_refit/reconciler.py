"""Drives versions and engines towards each other: the core's decisions, the ledger's appends.

All calls run in one event loop. Whatever changes rings one bell, and every call that waits looks
again at what it waits for.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_refit.core import orders
from treadle_refit.core.errors import (
    TrainerFencedError,
    VersionEndedError,
    VersionNotFoundError,
)
from treadle_refit.core.fleet import EngineState, Fleet, Report
from treadle_refit.core.orders import Discard, Install
from treadle_refit.core.publication import Publication, Versions
from treadle_refit.ports import VersionLedger
from treadle_runtime.tracker import Tracker
from treadle_weights.digests import weights_digest
from treadle_weights.layouts import Layout
from treadle_weights.plan import Copy, LayoutMismatchError, plan
from treadle_weights.transport import LoadOrder, WeightTransport

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 30.0
"""Most seconds that a call waits for news."""

_FINAL = (TrainerFencedError.reason, VersionEndedError.reason, VersionNotFoundError.reason)


@dataclass(frozen=True, slots=True)
class Limits:
    """How long refit waits for others, in seconds."""

    verify_timeout_s: float
    """From the bytes being sent to a commit without those that have not verified them."""
    send_timeout_s: float
    """Silence of its trainer after which an open version is aborted."""
    dead_after_s: float
    """Silence after which an engine is dead."""


class Reconciler:
    """The state of one run's refit, and the calls on it."""

    def __init__(
        self,
        run_id: str,
        limits: Limits,
        *,
        ledger: VersionLedger,
        transport: WeightTransport,
        tracker: Tracker,
        clock: Callable[[], float],
    ) -> None:
        """`clock` counts seconds and never goes back."""
        self._run_id = run_id
        self._limits = limits
        self._ledger = ledger
        self._transport = transport
        self._tracker = tracker
        self._clock = clock
        self._fleet = Fleet(limits.dead_after_s)
        self._known: Versions | None = None
        self._publishing = asyncio.Lock()
        self._bell = asyncio.Event()
        self._closing = False

    async def open_version(
        self, *, trainer_epoch: int, step: int, request_id: str, layout: Layout, trace_id: str
    ) -> Publication:
        """Puts a version in flight; keyed by `request_id`. Aborts another one in flight.

        Raises InvalidFieldError for an empty layout, and the ledger's refusals.
        """
        if not layout.rectangles:
            raise InvalidFieldError("layout", limit="at least one rectangle", value=0)
        async with self._publishing:
            versions = await self._versions()
            known = versions.find(request_id)
            if known:
                _check_repeated(known, trainer_epoch, step, layout)
                return known
            # The ledger first: a fenced trainer must not abort what its successor sends.
            version = await self._ledger.announce(
                trainer_epoch=trainer_epoch, step=step, request_id=request_id, trace_id=trace_id
            )
            publication = Publication(
                version=version,
                step=step,
                trainer_epoch=trainer_epoch,
                request_id=request_id,
                trace_id=trace_id,
                layout=layout,
                arena=self._transport.arena(self._run_id, version, layout.size()),
                opened_at=self._clock(),
            )
            replaced = versions.begin(publication)
            self._ring()
            if replaced:
                await self._abort(versions, replaced, f"replaced by version {version}")
        return publication

    async def send_version(
        self, *, trainer_epoch: int, version: int, digests: Mapping[str, int]
    ) -> Publication:
        """Waits until the members verified the version or the time is up, then commits it.

        Raises VersionEndedError, InvalidFieldError for digests that are not the layout's, and the
        ledger's refusals; after one that is not final, sending again goes on.
        """
        versions = await self._versions()
        held = versions.held
        if held and (held.version, held.trainer_epoch) == (version, trainer_epoch):
            return held
        commit_at = self._clock() + self._limits.verify_timeout_s
        publication = versions.send(version, trainer_epoch, digests, commit_at)
        self._ring()
        while self._is_in_flight(versions, version):
            now = self._clock()
            if not orders.pending(versions, self._fleet, now):
                async with self._publishing:
                    if self._is_in_flight(versions, version):
                        await self._commit(versions)
                break
            await self._news(publication.commit_at, self._fleet.next_change(now))
        if versions.held and versions.held.version == version:
            return versions.held
        raise versions.ended(version)

    async def await_demand(self, *, published_version: int, wait_s: float) -> bool:
        """Whether an engine needs parameters that only the trainer has; waits for one."""
        versions = await self._versions()
        if published_version > versions.newest:
            await self._refresh(versions)
        until = self._clock() + min(wait_s, LONGEST_WAIT_S)
        while True:
            now = self._clock()
            due = orders.demand_at(versions, self._fleet, now)
            if due is not None and due <= now:
                log.info("asking the trainer to publish: an engine cannot get its parameters")
                return True
            if now >= until or self._closing:
                return False
            await self._news(until, due)

    async def attend(
        self, report: Report, *, wait_s: float
    ) -> LoadOrder | Install | Discard | None:
        """Takes an engine's heartbeat and waits for an order to it.

        Raises LayoutMismatchError when the trainer's layout does not cover the engine's, and
        InvalidFieldError when it serves a version that was never committed.
        """
        versions = await self._versions()
        if max(report.serving, report.verified) > versions.newest and not (
            report.serving <= versions.newest and self._is_in_flight(versions, report.verified)
        ):
            await self._refresh(versions)
        if report.serving > versions.newest:
            raise InvalidFieldError(
                "serving", limit=f"a committed version, <= {versions.newest}", value=report.serving
            )
        now = self._clock()
        before = self._fleet.state(report.engine_id, versions.newest, now)
        if self._fleet.hear(report, now):
            self._log_news(
                report, before, self._fleet.state(report.engine_id, versions.newest, now)
            )
            self._ring()
        until = now + min(wait_s, LONGEST_WAIT_S, self._fleet.longest_silence_s)
        try:
            order = await self._next_order(versions, report, until)
        except asyncio.CancelledError:
            self._fleet.miss(report.engine_id, now, self._clock())
            self._ring()
            raise
        return self._load(order, report) if isinstance(order, orders.Load) else order

    async def watch(self) -> None:
        """Ends what waits for somebody who is gone; runs until it is cancelled."""
        while True:
            now = self._clock()
            if dead := self._fleet.bury(now):
                for engine in dead:
                    log.warning("engine %s is dead", engine.report.engine_id)
                self._ring()
            end = await self._end_stuck()
            await self._news(end, self._fleet.next_change(self._clock()))

    async def close(self) -> None:
        """Answers every call that waits for news, so that the process can end."""
        self._closing = True
        self._ring()

    async def _versions(self) -> Versions:
        """What is known of versions; the ledger is asked once, when there is something to do."""
        if self._known is None:
            newest = await self._ledger.newest_committed()
            self._known = self._known or Versions(newest)
        return self._known

    async def _refresh(self, versions: Versions) -> None:
        """Somebody knows of a version that refit does not: the ledger decides."""
        versions.learn(await self._ledger.newest_committed())
        self._ring()

    async def _next_order(
        self, versions: Versions, report: Report, until: float
    ) -> orders.Order | None:
        while True:
            order = orders.next_order(versions, report)
            if order is not None or self._clock() >= until or self._closing:
                return order
            await self._news(until)

    def _load(self, order: orders.Load, report: Report) -> LoadOrder:
        publication = order.publication
        try:
            copies = _plan(publication.layout, report.layout)
        except LayoutMismatchError:
            # No version of this trainer fits it, so nothing may wait for it.
            self._fleet.forget(report.engine_id)
            self._ring()
            raise
        digests = {name: publication.digests[name] for name in report.layout.by_tensor}
        return LoadOrder(
            publication.version, publication.arena, publication.layout, copies, digests
        )

    async def _commit(self, versions: Versions) -> None:
        """Records the commit of the version in flight. Final refusals abort it."""
        publication = versions.in_flight
        if publication is None:
            return
        begin = self._clock()
        try:
            await self._ledger.commit(
                trainer_epoch=publication.trainer_epoch,
                version=publication.version,
                weights_digest=weights_digest(publication.digests),
            )
        except TreadleError as error:
            if error.reason in _FINAL:
                log.warning("version %d ended: %s", publication.version, error.message)
                versions.abort(publication.version)
                self._ring()
            raise
        now = self._clock()
        members = self._fleet.members(now)
        verified = sum(engine.report.holds(publication.version) for engine in members)
        committed = replace(publication, members=verified, left_behind=len(members) - verified)
        versions.commit(committed)
        self._ring()
        self._log_commit(committed, commit_s=now - begin, total_s=now - publication.opened_at)

    async def _abort(self, versions: Versions, publication: Publication, message: str) -> None:
        log.warning("version %d ends: %s", publication.version, message)
        versions.abort(publication.version)
        self._ring()
        try:
            await self._ledger.abort(version=publication.version, message=message)
        except TreadleError as error:
            if error.reason == VersionEndedError.reason:
                # A commit whose answer was lost.
                versions.commit(publication)
                self._ring()
            else:  # it stays announced in the ledger, which nobody installs
                log.warning("version %d was not aborted: %s", publication.version, error.message)

    async def _end_stuck(self) -> float | None:
        """Aborts a version that nobody drives any more; returns when to look again."""
        versions = self._known
        publication = versions.in_flight if versions else None
        if versions is None or publication is None:
            return None
        since = publication.commit_at if publication.sent else publication.opened_at
        end = since + self._limits.send_timeout_s
        if self._clock() < end:
            return end
        async with self._publishing:
            if versions.in_flight is publication:
                await self._abort(versions, publication, "its trainer went silent")
        return self._clock()

    @staticmethod
    def _is_in_flight(versions: Versions, version: int) -> bool:
        return versions.in_flight is not None and versions.in_flight.version == version

    def _ring(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()

    async def _news(self, *moments: float | None) -> None:
        """Waits for the bell, at most until the first of the moments.

        Looking and waiting happen without a pause in between, so no ring is missed.
        """
        now = self._clock()
        until = min([now + LONGEST_WAIT_S, *(m for m in moments if m is not None)])
        try:
            async with asyncio.timeout(max(0.0, until - now)):
                await self._bell.wait()
        except TimeoutError:
            pass

    @staticmethod
    def _log_news(report: Report, before: EngineState, state: EngineState) -> None:
        """What people want to know: who comes, comes back, arrives or fails; not each version."""
        told = log.warning if report.failed > report.serving else log.info
        if told is log.warning or before in (EngineState.DEAD, EngineState.SUSPECT):
            told(
                "engine %s is %s: serves %d, failed to load %d %s",
                report.engine_id,
                state,
                report.serving,
                report.failed,
                report.failure,
            )

    def _log_commit(self, publication: Publication, *, commit_s: float, total_s: float) -> None:
        log.info(
            "version %d of step %d is committed: %d engines verified it, %d left behind, %.1f ms",
            publication.version,
            publication.step,
            publication.members,
            publication.left_behind,
            total_s * 1e3,
        )
        self._tracker.log(
            "version",
            {
                "version": publication.version,
                "step": publication.step,
                "members": publication.members,
                "left_behind": publication.left_behind,
                "bytes": publication.arena.size,
                "commit_s": round(commit_s, 6),
                "total_s": round(total_s, 6),
                "trace_id": publication.trace_id,
            },
        )


def _check_repeated(known: Publication, trainer_epoch: int, step: int, layout: Layout) -> None:
    """The same request with other content is an error."""
    for name, before, now in (
        ("trainer_epoch", known.trainer_epoch, trainer_epoch),
        ("step", known.step, step),
        ("layout", hash(known.layout), hash(layout)),
    ):
        if before != now:
            raise InvalidFieldError(name, limit=f"{before} as in this request before", value=now)


@lru_cache(maxsize=64)
def _plan(source: Layout, target: Layout) -> tuple[Copy, ...]:
    """Layouts stay, versions come and go: one plan for each pair."""
    return plan(source, target)
