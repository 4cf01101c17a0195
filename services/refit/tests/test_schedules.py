"""Any order of events: engines, trainers and refits that come, go, stall and fail.

Bytes are real: whatever an engine installs is compared with what the trainer of that version had.
`pytest --hypothesis-profile=long` looks for longer.
"""

import asyncio
import random
import tempfile
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from treadle_core.errors import Kind, TreadleError
from treadle_core.versions import VersionState
from treadle_refit.adapters.memory import MemoryLedger
from treadle_refit.core.fleet import Report
from treadle_refit.core.orders import Alias, Discard, Install
from treadle_refit.core.publication import Publication
from treadle_refit.reconciler import Limits, Reconciler
from treadle_weights.digests import weights_digest
from treadle_weights.files import Files
from treadle_weights.layouts import whole
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.transport import LoadOrder, WeightTransport

pytestmark = pytest.mark.timeout(3600)

WHICH = st.integers(0, 3)
LIMITS = Limits(verify_timeout_s=20.0, send_timeout_s=60.0, dead_after_s=15.0)
LAYOUT = whole({"a": ("float32", (4,)), "b": ("float32", (2,))})
FINAL = {"VERSION_ENDED", "TRAINER_FENCED"}
LONG = settings.get_current_profile_name() == "long"
LOT = 250 if LONG else 25
"""Events of `a_lot_happens`; a long example comes to about 2,000 in all."""
SETTINGS = (
    settings(stateful_step_count=100) if LONG else settings(max_examples=20, stateful_step_count=30)
)
IDLE = 12
"""Turns of the loop after which all tasks wait for time or for another call."""


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


class AtOnce(ThreadPoolExecutor):
    """Runs what it is given before it answers, so that the clock of the test is the only one."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001, as an executor does
            future.set_exception(error)
        return future


class NoTracker:
    def log(self, name: str, values: object) -> None:
        pass


def content(value: float) -> dict[str, NDArray[np.float32]]:
    """Parameters that are all the same number, so that a mix of two shows."""
    return {"a": np.full(4, value, np.float32), "b": np.full(2, value, np.float32)}


@dataclass
class Engine:
    """Does what it is told to, and checks that it may."""

    engine_id: str
    serving: int = 0
    verified: int = 0
    failed: int = 0
    draining: bool = False
    weights: float = 0.0
    """What it samples with."""
    arrival: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(LAYOUT.size(), np.uint8))

    def arrived(self) -> float:
        """The number that all of the arrival buffer is."""
        a, b = (self.arrival[r.offset : r.end].view(np.float32) for r in LAYOUT.rectangles)
        (value,) = {float(x) for x in (*a, *b)}
        return value


@dataclass
class Trainer:
    """A trainer process: its parameters are its last step, as a number."""

    epoch: int
    sender: Any
    parameters: float = 0.0
    published: int = 0
    digests: dict[str, int] = field(default_factory=dict[str, int])
    opened: Publication | None = None
    sending: "asyncio.Task[Publication] | None" = None
    sent_at: float = 0.0
    filled: dict[str, int] = field(default_factory=dict[str, int])


class Schedules(RuleBasedStateMachine):
    transport_of: Callable[[Path], WeightTransport]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(AtOnce(1))
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.now = 0.0
        self.ledger = UnreliableLedger()
        self.engines: dict[str, Engine] = {}
        self.counter = 0
        self.weights_of: dict[int, float] = {}
        self.watching: asyncio.Task[None] | None = None
        self.start_refit()
        self.trainer = self.new_trainer()
        self.zombie: Trainer | None = None

    # What surrounds the calls

    def transport(self) -> WeightTransport:
        return type(self).transport_of(Path(self.directory.name))

    def run_until_idle(self, call: Coroutine[Any, Any, Any] | None = None) -> Any:
        async def idle() -> Any:
            answer = await call if call else None
            for _ in range(IDLE):
                await asyncio.sleep(0)
            return answer

        return self.loop.run_until_complete(idle())

    def start_refit(self) -> None:
        self.refit = Reconciler(
            "run",
            LIMITS,
            ledger=self.ledger,
            transport=self.transport(),
            tracker=NoTracker(),
            clock=lambda: self.now,
        )
        if self.watching:
            self.watching.cancel()
        self.watching = self.loop.create_task(self.refit.watch())
        self.run_until_idle()

    def new_trainer(self) -> Trainer:
        return Trainer(self.ledger.trainer_epoch, self.transport().sender("run"))

    def stop_sending(self) -> None:
        """The call ends: with its answer, or with the process at either end."""
        if self.trainer.sending:
            self.trainer.sending.cancel()
            self.run_until_idle(asyncio.wait([self.trainer.sending]))
        self.trainer.sending = None

    def pass_seconds(self, seconds: float) -> None:
        self.now += seconds
        self.refit._ring()
        self.run_until_idle()

    def attend(self, engine: Engine, *, loads: bool = True, stuck: bool = False) -> bool:
        """One heartbeat and its order, obeyed unless stuck; says whether there was one."""
        report = Report(
            engine.engine_id,
            LAYOUT,
            engine.serving,
            engine.verified,
            engine.failed,
            draining=engine.draining,
        )
        order = self.run_until_idle(self.refit.attend(report, wait_s=0))
        assert order is None or not engine.draining
        match order:
            case LoadOrder():
                assert order.version > max(engine.serving, engine.failed)
                assert engine.verified <= engine.serving
                if not stuck:
                    self.load(engine, order, loads=loads)
            case Install():
                assert self.ledger.versions[order.version].state is VersionState.COMMITTED
                assert order.version == engine.verified > engine.serving
                engine.weights, engine.serving, engine.verified = (
                    engine.arrived(),
                    order.version,
                    0,
                )
            case Alias():
                assert self.ledger.versions[order.version].state is VersionState.COMMITTED
                assert order.base == engine.serving < order.version
                engine.serving = order.version
            case Discard():
                assert order.version == engine.verified
                engine.verified = 0
            case _:
                return False
        return True

    def load(self, engine: Engine, order: LoadOrder, *, loads: bool) -> None:
        try:
            if not loads:
                engine.arrival[:] = 0xFF
                raise AwayError("the load broke")
            self.transport().receiver().receive(order, LAYOUT, engine.arrival)
            engine.verified = order.version
        except TreadleError:
            engine.failed = order.version

    @contextmanager
    def refusals(self) -> Generator[None]:
        """Lets pass what may be answered: no, for good, or nothing from a ledger that is away."""
        try:
            yield
        except TreadleError as error:
            if error.reason not in FINAL and self.ledger.mode == "up":
                raise

    def open(self, trainer: Trainer, *, same: bool = False) -> None:
        self.counter += 1
        same = same and trainer.published > 0
        trainer.parameters = self.weights_of[trainer.published] if same else float(self.counter)
        trainer.opened = None
        with self.refusals():
            trainer.opened = self.run_until_idle(
                self.refit.open_version(
                    trainer_epoch=trainer.epoch,
                    step=self.counter,
                    request_id=f"r{self.counter}",
                    layout=LAYOUT,
                    trace_id="",
                    alias_of=trainer.published if same else 0,
                    weights=weights_digest(trainer.digests) if same else "",
                )
            )
        if trainer.opened:
            self.weights_of[trainer.opened.version] = trainer.parameters

    def send(self, trainer: Trainer) -> None:
        opened = trainer.opened
        if opened is None:
            return
        trainer.filled = trainer.digests
        if not opened.aliased:
            values = content(trainer.parameters)
            trainer.filled = trainer.sender.send(opened.arena, LAYOUT, values.items())
        trainer.sent_at = self.now
        trainer.sending = self.loop.create_task(
            self.refit.send_version(
                trainer_epoch=trainer.epoch, version=opened.version, digests=trainer.filled
            )
        )
        self.run_until_idle()

    def finish(self, trainer: Trainer) -> None:
        """The trainer takes the answer to what it sent."""
        opened, sending = trainer.opened, trainer.sending
        assert opened
        assert sending
        trainer.sending = None
        error = sending.exception()
        if error is None:
            version = sending.result().version
            assert version == opened.version
            assert self.ledger.versions[version].state is VersionState.COMMITTED
            trainer.published, trainer.digests = version, trainer.filled
            trainer.sender.keep(opened.arena)
            trainer.opened = None
            return
        assert isinstance(error, TreadleError)
        assert error.reason in FINAL or self.ledger.mode != "up"
        if error.reason in FINAL:
            trainer.opened = None
            if error.reason == "VERSION_ENDED" and not opened.aliased:
                trainer.sender.discard(opened.arena)

    def pick(self, which: int) -> Engine:
        return list(self.engines.values())[which % len(self.engines)]

    # What can happen

    @rule(seed=st.integers(0, 2**16))
    def a_lot_happens(self, seed: int) -> None:
        """Long histories: an example has no room for as many draws as they would take."""
        rng = random.Random(seed)  # noqa: S311, chance that can be repeated
        for _ in range(LOT):
            rng.choice(self.events(rng))()
            self.no_engine_serves_a_mix()
            self.refit_goes_on_watching()
            self.a_send_ends_in_a_commit_or_for_a_reason_and_in_time()

    def events(self, rng: random.Random) -> list[Callable[[], None]]:
        """What can happen now."""
        which, same = rng.randrange(4), rng.random() < 0.3
        events = [
            self.an_engine_joins,
            self.every_engine_attends,
            partial(self.time_passes, seconds=rng.choice([1.0, 4.0, 9.0, 25.0])),
            partial(self.the_ledger_comes_and_goes, mode=rng.choice(["up", "up", "away", "mute"])),
            partial(self.the_trainer_is_replaced, stopped=same),
            self.refit_restarts,
        ]
        if self.engines:
            loads, repeat = rng.random() < 0.8, rng.randint(1, 3)
            attends = partial(self.an_engine_attends, which, loads=loads, repeat=repeat)
            events += [attends, attends, attends]
            events += [partial(rng.choice([self.an_engine_dies, self.an_engine_drains]), which)]
        if self.trainer.sending is None:
            publishes = partial(self.the_trainer_publishes, same=same)
            events += [publishes, publishes, partial(self.the_trainer_opens, same=same)]
            events += [self.the_trainer_sends] * bool(self.trainer.opened)
        return events + [self.the_stopped_trainer_wakes] * bool(self.zombie)

    @rule()
    def an_engine_joins(self) -> None:
        self.counter += 1
        engine = Engine(f"e{self.counter}")
        if len(self.engines) < 4:
            self.engines[engine.engine_id] = engine
            self.attend(engine)

    @precondition(lambda self: self.engines)
    @rule(which=WHICH, loads=st.booleans(), repeat=st.integers(1, 3))
    def an_engine_attends(self, which: int, *, loads: bool, repeat: int) -> None:
        for _ in range(repeat):
            self.attend(self.pick(which), loads=loads)

    @rule()
    def every_engine_attends(self) -> None:
        for engine in self.engines.values():
            self.attend(engine)

    @precondition(lambda self: self.engines)
    @rule(which=WHICH)
    def an_engine_dies(self, which: int) -> None:
        del self.engines[self.pick(which).engine_id]

    @precondition(lambda self: self.engines)
    @rule(which=WHICH)
    def an_engine_drains(self, which: int) -> None:
        self.pick(which).draining = True
        assert not self.attend(self.pick(which))

    @precondition(lambda self: self.trainer.sending is None)
    @rule(same=st.booleans())
    def the_trainer_opens(self, *, same: bool) -> None:
        self.open(self.trainer, same=same)

    @precondition(lambda self: self.trainer.sending is None and self.trainer.opened)
    @rule()
    def the_trainer_sends(self) -> None:
        self.send(self.trainer)

    @precondition(lambda self: self.trainer.sending is None)
    @rule(same=st.booleans())
    def the_trainer_publishes(self, *, same: bool) -> None:
        self.open(self.trainer, same=same)
        self.send(self.trainer)
        self.every_engine_attends()

    @rule(stopped=st.booleans())
    def the_trainer_is_replaced(self, *, stopped: bool) -> None:
        """It was killed, or stopped: then it wakes up some time."""
        self.stop_sending()
        self.zombie = self.trainer if stopped else None
        self.ledger.trainer_epoch += 1
        self.trainer = self.new_trainer()

    @precondition(lambda self: self.zombie)
    @rule()
    def the_stopped_trainer_wakes(self) -> None:
        """It goes on where it was, and nothing that it does counts."""
        zombie, self.zombie = self.zombie, None
        assert zombie
        newest = self.ledger._newest()
        if zombie.opened and not zombie.opened.aliased:
            values = content(-1.0)
            zombie.sender.send(zombie.opened.arena, LAYOUT, values.items())
            call = self.refit.send_version(
                trainer_epoch=zombie.epoch,
                version=zombie.opened.version,
                digests=zombie.sender.send(zombie.opened.arena, LAYOUT, values.items()),
            )
            sending = self.loop.create_task(call)
            self.run_until_idle()
            sending.cancel()
            self.run_until_idle(asyncio.wait([sending]))
        self.open(zombie)
        assert zombie.opened is None
        assert self.ledger._newest() == newest

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
    def no_engine_serves_a_mix(self) -> None:
        for engine in self.engines.values():
            if engine.serving:
                assert engine.weights == self.weights_of[engine.serving]

    @invariant()
    def refit_goes_on_watching(self) -> None:
        assert self.watching
        assert not self.watching.done()

    @invariant()
    def a_send_ends_in_a_commit_or_for_a_reason_and_in_time(self) -> None:
        if self.trainer.sending is None:
            return
        if self.trainer.sending.done():
            self.finish(self.trainer)
        else:
            assert self.now < self.trainer.sent_at + LIMITS.verify_timeout_s

    def heal(self) -> None:
        """Everybody lives and answers, and time goes on."""
        self.ledger.mode = "up"
        self.stop_sending()
        self.trainer.opened = None
        self.pass_seconds(100.0)
        for engine in self.engines.values():
            engine.draining = False

    def settle(self, *, rounds: int) -> int:
        """Fair scheduling with a trainer that does as it is asked; returns its publications."""
        publications = 0
        for _ in range(rounds):
            if self.run_until_idle(self.refit.await_demand(published_version=0, wait_s=0)):
                publications += 1
                self.open(self.trainer)
                self.send(self.trainer)
            self.a_send_ends_in_a_commit_or_for_a_reason_and_in_time()
            while sum(self.attend(engine) for engine in self.engines.values()):
                self.no_engine_serves_a_mix()
            self.pass_seconds(3.0)
        return publications

    def teardown(self) -> None:
        """Healed, all engines come to serve the newest version, with few publications."""
        try:
            self.heal()
            publications = self.settle(rounds=60)
            newest = self.ledger._newest()
            assert all(e.serving == newest > 0 for e in self.engines.values())
            assert publications <= 2
            self.check_newcomer(newest)
        finally:
            tasks = [task for task in (self.watching, self.trainer.sending) if task]
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks))
            self.loop.close()
            self.directory.cleanup()

    def check_newcomer(self, newest: int) -> None:
        """What an engine gets that starts after refit and trainer have ended."""


class FilesSchedules(Schedules):
    transport_of = Files

    def check_newcomer(self, newest: int) -> None:
        """The newest committed version, as soon as refit is back, whoever else is not."""
        if not newest:
            return
        self.trainer = self.new_trainer()
        self.start_refit()
        engine = Engine("newcomer")
        while self.attend(engine):
            pass
        assert (engine.serving, engine.weights) == (newest, self.weights_of[newest])


class SharedMemorySchedules(Schedules):
    transport_of = SharedMemory


TestFiles = FilesSchedules.TestCase
TestSharedMemory = SharedMemorySchedules.TestCase
TestFiles.settings = TestSharedMemory.settings = SETTINGS
