"""The engine's life in its fleet: it attends to refit, and loads and installs what it is told."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from treadle_core.errors import Kind, TreadleError
from treadle_rollout.ports import Alias, Discard, Engine, Install, Membership, Order, Refit
from treadle_runtime import telemetry
from treadle_runtime.failpoints import failpoint
from treadle_runtime.tracker import Tracker
from treadle_weights.transport import LoadOrder, Receipt, VersionBackError, WeightReceiver

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_S = 5.0
"""How long a call waits for an order; also the heartbeat of an idle engine."""
BEAT_S = 2.0
"""Heartbeat while a version is loaded, in seconds."""
INSTALL_S = 60.0
"""An engine that does not install in so many seconds is broken."""

_AWAY_S = 0.5
_AGAIN_S = 0.1
_HOPELESS = {"WRONG_RUN", "LAYOUT_MISMATCH"}


class Fleet:
    """Makes one engine a member. Independent of the ticket loop: episodes go on meanwhile."""

    def __init__(
        self,
        engine: Engine,
        refit: Refit,
        receiver: WeightReceiver,
        *,
        leaving: asyncio.Event,
        done: asyncio.Event,
        tracker: Tracker,
    ) -> None:
        """`leaving` makes the engine drain; `done` ends its membership.

        The tracker gets a row for each version that is served (docs/metrics.md).
        """
        self._engine = engine
        self._refit = refit
        self._receiver = receiver
        self._leaving = leaving
        self._done = done
        self._tracker = tracker
        self._load_s = 0.0
        self._receipt = Receipt(0.0, 0.0, 0.0, 0)
        self._member = Membership(serving=engine.served_version)
        self._refusal = ""

    async def run(self) -> None:
        """Follows orders until `done` is set.

        Raises TreadleError when this engine can never be a member, TimeoutError when it does not
        install.
        """
        while not self._done.is_set():
            self._member = replace(self._member, draining=self._leaving.is_set())
            order = await self._attend(WAIT_S)
            # Orders follow from what we say: one that is not understood is given again.
            match order:
                case LoadOrder() | Install() | Alias() if order.version < self._member.serving:
                    await self._refuse(order)
                case LoadOrder() if order.version not in (
                    self._member.verified,
                    self._member.serving,
                ):
                    await self._load(order)
                case Install() if order.version == self._member.verified:
                    await self._install(order)
                case Alias() if order.base == self._member.serving:
                    await self._alias(order)
                case Discard() if order.version == self._member.verified:
                    self._member = replace(self._member, verified=0)
                case None:
                    pass
                case _:
                    await self._unless_done(asyncio.sleep(_AGAIN_S))
        self._member = replace(self._member, draining=True)
        await self._call(0.0)

    async def _attend(self, wait_s: float) -> Order | None:
        """One call, cut short when there is something new to say."""
        return await self._unless_done(self._call(wait_s))

    async def _call(self, wait_s: float) -> Order | None:
        try:
            order = await self._refit.attend(self._member, self._engine.layout, wait_s=wait_s)
        except TreadleError as error:
            if error.reason in _HOPELESS or error.kind is Kind.INVALID:
                raise
            if error.reason != self._refusal:
                self._refusal = error.reason
                log.warning("refit: %s: %s", error.reason, error.message)
            await asyncio.sleep(min(_AWAY_S, wait_s))
            return None
        self._refusal = ""
        return order

    async def _refuse(self, order: LoadOrder | Install | Alias) -> None:
        """No version goes back, whoever orders it: what is served is served on."""
        serving = self._member.serving
        error = VersionBackError(
            f"version {order.version} comes after {serving}",
            field="version",
            limit=f"> {serving}, which is served",
            value=order.version,
        )
        log.warning("refit: %s: %s", error.reason, error.message)
        failure = f"{error.reason}: {error.message}"
        self._member = replace(self._member, failed=order.version, failure=failure)
        await self._unless_done(asyncio.sleep(_AGAIN_S))

    async def _load(self, order: LoadOrder) -> None:
        """Loads in a thread and goes on attending, so that a long load is no silence."""
        if order.version == self._member.failed:
            await self._unless_done(asyncio.sleep(_AWAY_S))
        self._member = replace(self._member, verified=0)
        clock = asyncio.get_running_loop().time
        began_at = clock()
        loading = asyncio.create_task(
            asyncio.to_thread(
                self._receiver.receive, order, self._engine.layout, self._engine.arrival
            )
        )
        while not (await asyncio.wait({loading}, timeout=BEAT_S))[0]:
            await self._call(0.0)
        try:
            self._receipt = await loading
        except TreadleError as error:
            log.warning("version %d was not loaded: %s", order.version, error.message)
            self._member = replace(
                self._member, failed=order.version, failure=f"{error.reason}: {error.message}"
            )
        else:
            failpoint("rollout.load.after_verify")
            self._load_s = clock() - began_at
            self._member = replace(self._member, verified=order.version, failed=0, failure="")

    async def _install(self, order: Install) -> None:
        failpoint("rollout.install.before_swap")
        install_s = await self._in_trace("install", order, self._engine.install(order.version))
        failpoint("rollout.install.after_swap")
        self._member = replace(self._member, serving=order.version, verified=0)
        log.info("serving version %d", order.version)
        self._row(order, install_s, load_s=self._load_s, size=self._engine.arrival.size)

    async def _alias(self, order: Alias) -> None:
        alias_s = await self._in_trace("alias", order, self._engine.alias(order.version))
        self._member = replace(self._member, serving=order.version)
        log.info("serving version %d, an alias of %d", order.version, order.base)
        self._row(order, alias_s, load_s=0.0, size=0)

    @staticmethod
    async def _in_trace(
        name: str, order: Install | Alias, work: Coroutine[Any, Any, None]
    ) -> float:
        """Does the work as a part of the step's trace; returns the seconds that it took."""
        clock = asyncio.get_running_loop().time
        began_at = clock()
        came_from = f"00-{order.trace_id}-{order.trace_id[:16]}-01" if order.trace_id else ""
        with telemetry.tracer().start_as_current_span(
            name,
            context=telemetry.parent(came_from),
            attributes={"treadle.version": order.version},
        ):
            async with asyncio.timeout(INSTALL_S):
                await work
        return clock() - began_at

    def _row(self, order: Install | Alias, install_s: float, *, load_s: float, size: int) -> None:
        aliased = isinstance(order, Alias)
        receipt = Receipt(0.0, 0.0, 0.0, 0, encoding="alias") if aliased else self._receipt
        row = {"version": order.version, "bytes": size, "aliased": int(aliased)}
        seconds = {
            "load_s": load_s,
            "wire_s": receipt.wire_s,
            "place_s": receipt.load_s,
            "verify_s": receipt.verify_s,
            "install_s": install_s,
        }
        moved = {
            "wire_bytes": receipt.wire_bytes,
            "launches": receipt.launches,
            "encoding": receipt.encoding,
            "group_epoch": receipt.epoch,
        }
        rounded = {name: round(value, 6) for name, value in seconds.items()}
        self._tracker.log("version", row | rounded | moved)

    async def _unless_done(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Waits for `work`, or for the end or the draining of this replica if that is sooner."""
        events = [self._done] if self._leaving.is_set() else [self._done, self._leaving]
        task = asyncio.create_task(work)
        news = [asyncio.create_task(event.wait()) for event in events]
        try:
            await asyncio.wait({task, *news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for other in news:
                other.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        return None if task.cancelled() else task.result()
