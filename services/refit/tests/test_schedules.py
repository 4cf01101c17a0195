"""Any order of events: engines, trainers and refits that come, go, stall and fail."""

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from treadle_core.errors import Kind, TreadleError
from treadle_core.versions import VersionState
from treadle_refit.adapters.memory import MemoryLedger
from treadle_refit.core.fleet import Report
from treadle_refit.core.orders import Discard, Install
from treadle_refit.core.publication import Publication
from treadle_refit.reconciler import Limits, Reconciler
from treadle_weights.layouts import whole
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.transport import LoadOrder

LIMITS = Limits(verify_timeout_s=20.0, send_timeout_s=60.0, dead_after_s=15.0)
LAYOUT = whole({"a": ("float32", (4,))})
FINAL = {"VERSION_ENDED", "TRAINER_FENCED"}


class AwayError(TreadleError):
    kind = Kind.UNAVAILABLE
    reason = "PEER_AWAY"


class UnreliableLedger(MemoryLedger):
    """A ledger that is away at times, or whose answers are lost."""

    mode = "up"

    async def commit(self, **arguments: Any) -> None:
        await self._unreliably(super().commit(**arguments))

    async def announce(self, **arguments: Any) -> int:
        return await self._unreliably(super().announce(**arguments))

    async def abort(self, **arguments: Any) -> None:
        await self._unreliably(super().abort(**arguments))

    async def _unreliably(self, call: Coroutine[Any, Any, Any]) -> Any:
        if self.mode == "away":
            call.close()
            raise AwayError("away")
        await asyncio.sleep(0)
        answer = await call
        if self.mode == "mute":
            raise AwayError("answer lost")
        return answer


class NoTracker:
    def log(self, name: str, values: object) -> None:
        pass


@dataclass
class Engine:
    """Serves what it is told to, and checks that it may."""

    engine_id: str
    serving: int = 0
    verified: int = 0
    failed: int = 0


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.now = 0.0
        self.ledger = UnreliableLedger()
        self.engines: dict[str, Engine] = {}
        self.counter = 0
        self.opened: Publication | None = None
        self.sending: asyncio.Task[Publication] | None = None
        self.sent_at = 0.0
        self.arenas: set[str] = set()
        self.watching: asyncio.Task[None] | None = None
        self.start_refit()

    # What surrounds the calls

    def run_until_idle(self, call: Coroutine[Any, Any, Any] | None = None) -> Any:
        async def idle() -> Any:
            answer = await call if call else None
            for _ in range(25):
                await asyncio.sleep(0)
            return answer

        return self.loop.run_until_complete(idle())

    def start_refit(self) -> None:
        self.refit = Reconciler(
            "run",
            LIMITS,
            ledger=self.ledger,
            transport=SharedMemory(Path(self.directory.name)),
            tracker=NoTracker(),
            clock=lambda: self.now,
        )
        if self.watching:
            self.watching.cancel()
        self.watching = self.loop.create_task(self.refit.watch())
        self.run_until_idle()

    def stop_sending(self) -> None:
        """The trainer's call ends: with its answer, or with the process at either end."""
        if self.sending:
            self.sending.cancel()
            self.run_until_idle(asyncio.wait([self.sending]))
        self.sending = None

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        self.refit._ring()
        self.run_until_idle()

    def attend(self, engine: Engine, *, loads: bool = True, stuck: bool = False) -> bool:
        """One heartbeat and its order, obeyed unless stuck; says whether there was one."""
        report = Report(engine.engine_id, LAYOUT, engine.serving, engine.verified, engine.failed)
        order = self.run_until_idle(self.refit.attend(report, wait_s=0))
        match order:
            case LoadOrder():
                assert order.version > max(engine.serving, engine.failed)
                assert engine.verified <= engine.serving
                if stuck:
                    return True
                if loads and order.arena.path in self.arenas:
                    engine.verified = order.version
                else:
                    engine.failed = order.version
            case Install():
                assert self.ledger.versions[order.version].state is VersionState.COMMITTED
                assert order.version == engine.verified > engine.serving
                engine.serving, engine.verified = order.version, 0
            case Discard():
                assert order.version == engine.verified
                engine.verified = 0
            case None:
                return False
        return True

    def open(self) -> None:
        self.counter += 1
        try:
            self.opened = self.run_until_idle(
                self.refit.open_version(
                    trainer_epoch=self.ledger.trainer_epoch,
                    step=self.counter,
                    request_id=f"r{self.counter}",
                    layout=LAYOUT,
                    trace_id="",
                )
            )
        except AwayError:
            self.opened = None

    def send(self) -> None:
        if self.opened is None:
            return
        self.arenas.add(self.opened.arena.path)
        self.sent_at = self.now
        self.sending = self.loop.create_task(
            self.refit.send_version(
                trainer_epoch=self.opened.trainer_epoch,
                version=self.opened.version,
                digests={"a": 1},
            )
        )
        self.run_until_idle()

    # What can happen

    @rule()
    def an_engine_joins(self) -> None:
        self.counter += 1
        engine = Engine(f"e{self.counter}")
        if len(self.engines) < 4:
            self.engines[engine.engine_id] = engine
            self.attend(engine)

    @precondition(lambda self: self.engines)
    @rule(data=st.data(), loads=st.booleans(), repeat=st.integers(1, 3))
    def an_engine_attends(self, data: st.DataObject, *, loads: bool, repeat: int) -> None:
        engine = self.engines[data.draw(st.sampled_from(sorted(self.engines)))]
        for _ in range(repeat):
            self.attend(engine, loads=loads)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def an_engine_dies(self, data: st.DataObject) -> None:
        del self.engines[data.draw(st.sampled_from(sorted(self.engines)))]

    @precondition(lambda self: self.sending is None)
    @rule()
    def the_trainer_opens(self) -> None:
        self.open()

    @precondition(lambda self: self.sending is None and self.opened)
    @rule()
    def the_trainer_sends(self) -> None:
        self.send()

    @rule()
    def the_trainer_restarts(self) -> None:
        self.stop_sending()
        self.ledger.trainer_epoch += 1
        self.opened = None
        self.arenas.clear()

    @rule()
    def refit_restarts(self) -> None:
        self.stop_sending()
        self.start_refit()

    @rule(mode=st.sampled_from(["up", "up", "away", "mute"]))
    def the_ledger_comes_and_goes(self, mode: str) -> None:
        self.ledger.mode = mode

    @rule(seconds=st.sampled_from([1.0, 4.0, 9.0, 25.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        self.pass_seconds(seconds)

    @rule()
    def engines_live_but_load_nothing_for_a_while(self) -> None:
        for _ in range(7):
            self.pass_seconds(3.0)
            for engine in self.engines.values():
                self.attend(engine, stuck=True)

    # What must hold

    @invariant()
    def refit_goes_on_watching(self) -> None:
        assert self.watching
        assert not self.watching.done()

    @invariant()
    def a_send_ends_in_a_commit_or_for_a_reason_and_in_time(self) -> None:
        if self.sending is None:
            return
        if not self.sending.done():
            assert self.now < self.sent_at + LIMITS.verify_timeout_s
            return
        error = self.sending.exception()
        if error is None:
            version = self.sending.result().version
            assert self.ledger.versions[version].state is VersionState.COMMITTED
            self.opened = None
        else:
            assert isinstance(error, TreadleError)
            assert error.reason in FINAL or self.ledger.mode != "up"
            if error.reason in FINAL:
                self.opened = None
        self.sending = None

    def teardown(self) -> None:
        """Healed, all engines come to serve the newest version, with few publications."""
        try:
            self.ledger.mode = "up"
            self.stop_sending()
            self.opened = None
            self.pass_seconds(100.0)
            publications = 0
            for _ in range(60):
                if self.run_until_idle(self.refit.await_demand(published_version=0, wait_s=0)):
                    publications += 1
                    self.open()
                    self.send()
                if self.sending is None or self.sending.done():
                    self.sending = None
                while sum(self.attend(engine) for engine in self.engines.values()):
                    pass
                self.pass_seconds(3.0)
            newest = self.run_until_idle(self.ledger.newest_committed())
            assert all(e.serving == newest > 0 for e in self.engines.values())
            assert publications <= 2
        finally:
            tasks = [task for task in (self.watching, self.sending) if task]
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks))
            self.loop.close()
            self.directory.cleanup()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
