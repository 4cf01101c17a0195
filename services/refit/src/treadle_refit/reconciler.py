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
from treadle_refit.core.fleet import Fleet, Report
from treadle_refit.core.orders import Alias, Discard, Install
from treadle_refit.core.publication import Publication, Versions
from treadle_refit.news import tell_commit, tell_engine, tell_plan
from treadle_refit.ports import VersionLedger
from treadle_refit.recovery import recovered
from treadle_runtime.failpoints import failpoint
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
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """`clock` counts seconds and never goes back; `on_news`: orders may change."""
        self._run_id = run_id
        self._limits = limits
        self._ledger = ledger
        self._transport = transport
        self._tracker = tracker
        self._clock = clock
        self._on_news = on_news
        self._fleet = Fleet(limits.dead_after_s)
        self._known: Versions | None = None
        self._planned: dict[str, tuple[Layout, Layout]] = {}
        """The layouts of the last plan of each engine."""
        self._publishing = asyncio.Lock()
        self._bell = asyncio.Event()
        self._closing = False

    async def open_version(
        self,
        *,
        trainer_epoch: int,
        step: int,
        request_id: str,
        layout: Layout,
        trace_id: str,
        alias_of: int = 0,
        weights: str = "",
    ) -> Publication:
        """Puts a version in flight; keyed by `request_id`. Aborts another one in flight.

        It is an alias where refit holds `alias_of` as the newest committed version. Raises
        InvalidFieldError for an empty layout and where `weights` is not the digest of `alias_of`,
        and the ledger's refusals.
        """
        if not layout.rectangles:
            raise InvalidFieldError("layout", limit="at least one rectangle", value=0)
        async with self._publishing:
            versions = await self._versions()
            known = versions.find(request_id)
            if known:
                _check_repeated(known, trainer_epoch, step, layout)
                return known
            base = versions.base(alias_of, weights, layout)
            publication = await self._announce(trainer_epoch, step, request_id, layout, trace_id)
            if base:
                publication = await self._alias(publication, base)
            replaced = versions.begin(publication)
            self._ring()
            if replaced:
                await self._abort(versions, replaced, f"replaced by version {publication.version}")
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
        # One that was found where it lies was committed by whichever trainer the ledger let.
        if held and held.version == version and held.trainer_epoch in (trainer_epoch, 0):
            return held
        now = self._clock()
        commit_at = now + self._limits.verify_timeout_s
        publication = versions.send(
            version, trainer_epoch, digests, commit_at=commit_at, sent_at=now
        )
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
    ) -> LoadOrder | Install | Discard | Alias | None:
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
            tell_engine(report, before, self._fleet.state(report.engine_id, versions.newest, now))
            self._ring()
        until = now + min(wait_s, LONGEST_WAIT_S, self._fleet.longest_silence_s)
        try:
            order = await self._next_order(versions, report, until)
        except asyncio.CancelledError:
            self._fleet.miss(report.engine_id, now, self._clock())
            self._ring()
            raise
        if order is not None:
            failpoint("refit.attend.before_order")
        return self._load(order, report) if isinstance(order, orders.Load) else order

    async def watch(self) -> None:
        """Ends what waits for somebody who is gone; runs until it is cancelled."""
        while True:
            now = self._clock()
            if dead := self._fleet.bury(now):
                for engine in dead:
                    log.warning("engine %s is dead", engine.report.engine_id)
                    self._planned.pop(engine.report.engine_id, None)
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
            versions = Versions()
            await self._refresh(versions)
            self._known = self._known or versions
        return self._known

    async def _refresh(self, versions: Versions) -> None:
        """Learns from the ledger what is committed, and whether it lies where engines can load."""
        newest = await self._ledger.newest_committed()
        versions.learn(newest.version)
        if versions.held is None:
            found = await recovered(self._transport, self._run_id, newest, self._clock())
            if found:
                versions.hold(found)
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
        layouts = (publication.layout, report.layout)
        if self._planned.get(report.engine_id) != layouts:
            self._planned[report.engine_id] = layouts
            tell_plan(self._tracker, publication, report, copies)
        digests = {name: publication.digests[name] for name in report.layout.by_tensor}
        return LoadOrder(
            publication.version, publication.arena, publication.layout, copies, digests
        )

    async def _announce(
        self, trainer_epoch: int, step: int, request_id: str, layout: Layout, trace_id: str
    ) -> Publication:
        """Gets a number. The ledger comes first: a fenced trainer must abort nothing."""
        began_at = self._clock()
        failpoint("refit.open.before_announce")
        version = await self._ledger.announce(
            trainer_epoch=trainer_epoch, step=step, request_id=request_id, trace_id=trace_id
        )
        failpoint("refit.open.after_announce")
        now = self._clock()
        return Publication(
            version=version,
            step=step,
            trainer_epoch=trainer_epoch,
            request_id=request_id,
            trace_id=trace_id,
            layout=layout,
            arena=self._transport.arena(self._run_id, version, layout.size()),
            opened_at=now,
            open_s=now - began_at,
        )

    async def _alias(self, publication: Publication, base: Publication) -> Publication:
        """The publication with the bytes of `base`; unchanged where those are gone."""
        version = publication.version
        try:
            arena = await asyncio.to_thread(
                self._transport.alias, self._run_id, version, base.arena
            )
        except TreadleError as error:
            log.warning("version %d is no alias of %d: %s", version, base.version, error.message)
            return publication
        return replace(
            publication,
            arena=arena,
            layout=base.layout,
            same=base.same | {base.version},
            expected=base.digests,
        )

    async def _commit(self, versions: Versions) -> None:
        """Records the commit of the version in flight. Final refusals abort it."""
        publication = versions.in_flight
        if publication is None:
            return
        begin = self._clock()
        failpoint("refit.commit.before_append")
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
        failpoint("refit.commit.after_append")
        now = self._clock()
        members = self._fleet.members(now)
        verified = sum(publication.held_by(engine.report) for engine in members)
        committed = replace(publication, members=verified, left_behind=len(members) - verified)
        versions.commit(committed)
        self._ring()
        tell_commit(self._tracker, committed, began_at=begin, now=now)

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
        self._on_news()

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


def _check_repeated(known: Publication, trainer_epoch: int, step: int, layout: Layout) -> None:
    """The same request with other content is an error."""
    same_layout = (
        known.layout.tensors == layout.tensors if known.aliased else known.layout == layout
    )
    for name, before, now in (
        ("trainer_epoch", known.trainer_epoch, trainer_epoch),
        ("step", known.step, step),
    ):
        if before != now:
            raise InvalidFieldError(name, limit=f"{before} as in this request before", value=now)
    if not same_layout:
        raise InvalidFieldError("layout", limit="as in this request before", value="another")


@lru_cache(maxsize=64)
def _plan(source: Layout, target: Layout) -> tuple[Copy, ...]:
    """Layouts stay, versions come and go: one plan for each pair."""
    return plan(source, target)
