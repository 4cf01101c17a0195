"""Random schedules of one run, and the fair one that must complete it from wherever it is."""

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeAlias

from ledger_model.calls import World, happens
from ledger_model.clock import VirtualLoop
from ledger_model.journal import Journal
from ledger_model.oracle import BreachError, Oracle, require
from ledger_model.process import Process, Session, differences, folded, reloaded
from ledger_model.recipes import bounds_of, filter_of, rules_of
from ledger_model.replica import Held, Replica
from ledger_model.trainer import Trainer
from treadle_experience.core.state import TaskState
from treadle_experience.core.steps import is_complete
from treadle_experience.ports import Ledger
from treadle_payloads.store import PayloadStore

PAUSES = {0.0: 50.0, 0.01: 10.0, 0.05: 10.0, 0.2: 15.0, 0.6: 10.0, 2.0: 3.0, 11.0: 1.0, 65.0: 0.2}
"""Seconds between two actions, and how often."""

PLANS = (
    *("before", "after", "now", "full", "overtaken"),
    *("before_condensing", "after_condensing", "late_condensing"),
)
"""What can hit the service."""


@dataclass
class Schedule:
    """One run under one seed. `step` does one thing; `complete` lets everybody behave."""

    random: Random
    ledger: Ledger
    size: int
    """Actions that are planned: the run is made about as long."""
    store: PayloadStore
    crashes: float = 0.02
    """Part of the actions that plan a crash of the service."""
    stored: list[Any] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)
    condensed: int = 0
    """Condensations of earlier lives."""
    replicas: list[Replica] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)
    names: Any = field(default_factory=itertools.count)
    engines_until: int = 0
    """No engine serves anything before this action."""
    actions: int = 0
    lives: int = 1
    overtaken: Process | None = None
    """A process that does not know yet that it has a successor."""

    def __post_init__(self) -> None:
        noise = Random(self.random.getrandbits(16))  # noqa: S311
        self.rules = rules_of(self.random, self.size)
        self.filter = filter_of(self.random, self.rules)
        self.num_tasks = self.random.choice((3, 9, 20, 10**6, 10**6))
        self.loop = VirtualLoop(lambda: noise.uniform(0.001, 0.03))
        process = self._process()
        try:
            self._populate(process)
        except BaseException:  # Hypothesis ends an example at any draw
            process.kill()
            self.loop.close()
            raise

    def _populate(self, process: Process) -> None:
        """The world around the ledger's process."""
        oracle = Oracle(bounds_of(self.rules), self.forgotten)
        sets = (
            {each.name for each in self.rules.evaluation.sets} if self.rules.evaluation else set()
        )
        journal = Journal(oracle, self.store, self.filter, sets, self.stored)
        self.world = World(self.random, self.loop, oracle, journal, process)
        self.replicas = [self._replica() for _ in range(self.random.randint(1, 4))]
        self.checkpoint_every = self.random.choice((1, 2, 3, 5))
        self.publish_every = self.random.randint(1, self.rules.max_lag + 1)
        self.trainers = [self._trainer()]
        self.tasks: set[asyncio.Task[None]] = set()

    def step(self) -> None:
        """One random action, and some time."""
        chosen = self.random.choices(list(ACTIONS), list(ACTIONS.values()))[0]
        if happens(self.random, self.crashes):
            chosen = Schedule.hit
        self.play(chosen, self.random.choices(list(PAUSES), list(PAUSES.values()))[0])
        if self.actions % 20 == 0:
            self.check()

    def play(self, action: "Action", pause_s: float) -> None:
        """One action, and the time after it."""
        self.actions += 1
        action(self)
        self._pass(pause_s)

    def behave(self) -> bool:
        """Everybody does what is next; whether all is done."""
        oracle = self.world.oracle
        newest = max(oracle.published, default=0)
        for replica in self.replicas:
            if newest:
                replica.install(newest)
            self._do(replica, replica.renew())
            for held in list(replica.held.values()):
                self._do(None, replica.finish(held))
        self._pass(0.1)
        for replica in self.replicas:
            if newest:
                self._do(replica, replica.lease(8))
        for _ in range(6):
            if self.trainers[-1].fenced:
                self.trainers.append(self._trainer())
            self._do(self.trainers[-1], self.trainers[-1].act())
            self._pass(0.1)
        self._pass(1.0)
        # A trainer that restores may open again what a replica was told is complete.
        return (
            is_complete(self.world.process.run)
            and all(replica.complete for replica in self.replicas)
            and not any(replica.held for replica in self.replicas)
        )

    def is_over(self) -> bool:
        """Whether everybody who lives was told that all is done."""
        return all(replica.complete for replica in self.replicas)

    def check(self) -> None:
        """Compares notes, state and ledger, where nothing is on its way."""
        process = self.world.process
        if not process.is_quiet():
            return
        self.world.oracle.check_state(process.state)
        self.world.journal.check(process.state)
        if happens(self.random, 0.2):
            unlike = differences(reloaded(process), process.state)
            require(not unlike, "a reader of the journal holds the same state", *unlike)

    def complete(self) -> None:
        """From here on everybody behaves: the run must complete. Checks it in the end."""
        self.world.fair = True
        self.random = self.world.random = Random(0)  # noqa: S311
        self._restart()
        for replica in self.replicas:
            replica.busy = False
        self.world.note("fair", "everybody behaves from here on")
        for _ in range(200 + 20 * self.rules.steps):
            if self.behave():
                break
        else:
            raise BreachError(f"liveness: the run cannot complete: {_stuck(self.world.process)}")
        self.check()
        pending = (TaskState.OPEN, TaskState.READY, TaskState.CLAIMED, TaskState.TRAINED)
        state = self.world.process.state
        left = [s for s in pending if state.task_counts[s]]
        require(not left, "nothing is pending in the end", left)
        self.world.journal.check_account(state, self.ledger.load())

    def lines(self) -> list[str]:
        """What happened, as text."""
        return [str(self.rules), f"{self.filter}, {self.num_tasks} tasks", *self.world.lines()]

    def close(self) -> None:
        """Lets everything go."""
        for task in self.tasks:
            task.cancel()
        self.loop.run_for(0)
        for process in (self.world.process, self.overtaken):
            if process is not None:
                process.kill()
        self.loop.close()
        for sent in self.world.oracle.sent.values():
            for each in sent.values():
                for data in (each.data, *each.images):
                    self.store.delete(hashlib.sha256(data).hexdigest())

    def _pass(self, seconds: float) -> None:
        self.loop.run_for(seconds)
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.discard(task)
            error = task.exception()
            if error is not None:
                raise error
        process = self.world.process
        failure = process.failure()
        if failure is not None:
            raise BreachError(f"the service ended: {failure!r}") from failure
        if process.session.dead:
            self._restart()

    def _do(self, who: Any, work: Coroutine[Any, Any, None]) -> None:
        """Starts a client's call; one that waits for an answer already does nothing more."""
        if who is not None and who.busy:
            work.close()
            return
        if who is not None:
            who.busy = True
            work = _while_busy(who, work)
        self.tasks.add(self.loop.create_task(work))

    def _process(self) -> Process:
        names = [each.name for each in self.rules.evaluation.sets] if self.rules.evaluation else []
        sources = {"": self._read, **dict.fromkeys(names, lambda cursor: {"held_out": cursor})}
        session = Session(self.ledger, self.stored, self.forgotten)
        return Process(self.loop, session, self.rules, sources, self.filter, self.store)

    def _read(self, cursor: int) -> dict[str, int] | None:
        return {"number": cursor} if cursor < self.num_tasks else None

    def _replica(self) -> Replica:
        return Replica(f"r{next(self.names)}", self.world)

    def _trainer(self) -> Trainer:
        name = f"trainer{next(self.names)}"
        return Trainer(name, self.world, self.checkpoint_every, self.publish_every)

    def hit(self) -> None:
        session = self.world.process.session
        planned = self.random.choice(PLANS)
        self.world.note("service", "is hit", planned)
        if planned == "full":
            session.full = self.random.randint(1, 5)
        elif planned == "overtaken":
            self._restart(overtaken=True)
        else:
            session.crash = planned
            session.dead = planned == "now"

    def _restart(self, *, overtaken: bool = False) -> None:
        """The service dies, and its successor finds what was stored: no more and no less.

        One that was overtaken stood still only, and goes on with the calls that it has.
        """
        before = self.world.process
        if self.overtaken is not None:
            self.overtaken.kill()
        self.overtaken = before if overtaken else None
        if not overtaken:
            before.kill()
        quiet = before.keeper.position == before.state.position
        self.lives += 1
        self.world.note("service", "starts again")
        self.condensed += before.session.condensed
        self._check_ledger()
        self.world.process = self._process()
        before.session.arrive()
        if quiet and before.session.crash != "after":
            unlike = differences(before.state, self.world.process.state)
            require(not unlike, "a successor holds the same state", *unlike)

    def _check_ledger(self) -> None:
        """Compares the ledger, as it is loaded and as it is read, with what was stored."""
        stored, found = folded(self.stored), self.ledger.read()
        for state in (folded(self.ledger.load()), folded(found.journal)):
            unlike = differences(state, stored)
            require(not unlike, "the ledger holds what it stored", *unlike)
        require(found.position == stored.position, "and knows how much", found.position)

    # What can happen.

    def lease(self) -> None:
        replica = self._serving()
        if replica is not None:
            wait_s = 4 if happens(self.random, 0.1) else 0
            self._do(replica, replica.lease(self.random.randint(1, 6), wait_s))

    def renew(self) -> None:
        replica = self._awake()
        if replica is not None:
            self._do(replica, replica.renew())

    def finish(self) -> None:
        self._with_episode(lambda replica, held: replica.finish(held))

    def fail(self) -> None:
        unsent = happens(self.random, 0.5)
        self._with_episode(
            lambda replica, held: replica.fail(held) if unsent else replica.finish(held)
        )

    def forge(self) -> None:
        self._with_episode(
            lambda replica, held: replica.finish(held) if held.result else replica.send_forged(held)
        )

    def _with_episode(self, act: Callable[[Replica, Held], Coroutine[Any, Any, None]]) -> None:
        replica = self._awake()
        if replica is not None and replica.held and not replica.busy:
            held = self.random.choice(list(replica.held.values()))
            if held.versions - {0}:
                self._do(replica, act(replica, held))

    def send_again(self) -> None:
        replica = self.random.choice(self.replicas)
        if replica.delivered and not replica.busy:
            self._do(replica, replica.send_again())

    def give_back(self) -> None:
        replica = self._awake()
        if replica is not None and replica.held and not replica.busy:
            self._do(replica, replica.give_back(self.random.randint(1, 4)))

    def install(self) -> None:
        """A replica may skip versions and lag behind; it never goes back to an older number."""
        replica = self._awake()
        newer = [v for v in self.world.oracle.published if replica and v > replica.version]
        if replica is not None and newer and self.actions >= self.engines_until:
            newest = happens(self.random, 0.7)
            replica.install(max(newer) if newest else self.random.choice(newer))

    def sleep(self) -> None:
        """SIGSTOP, or SIGCONT."""
        replica = self.random.choice(self.replicas)
        replica.silent = not replica.silent

    def die(self) -> None:
        """SIGKILL; its successor has its name, or another."""
        place = self.random.randrange(len(self.replicas))
        replica = self.replicas[place]
        if replica.busy:
            return
        replica.die()
        if happens(self.random, 0.5):
            self.replicas[place] = self._replica()

    def lose_engines(self) -> None:
        """For a while no engine serves anything."""
        if happens(self.random, 0.1):
            self.engines_until = self.actions + self.random.randint(5, 60)
            for replica in self.replicas:
                if not replica.busy:
                    replica.die()

    def train(self) -> None:
        """The newest trainer goes on, or one that was overtaken tries to."""
        zombie = happens(self.random, 0.15)
        trainer = self.random.choice(self.trainers) if zombie else self.trainers[-1]
        if trainer.fenced and trainer is self.trainers[-1]:
            self.take_over()
            return
        self._do(trainer, trainer.act())

    def take_over(self) -> None:
        """A second trainer; the first does not know yet."""
        older = happens(self.random, 0.5)
        self.trainers = [*self.trainers[-2:], self._trainer()]
        self._do(self.trainers[-1], self.trainers[-1].act(older=older))

    def lose_payload(self) -> None:
        self.world.journal.lose(self.random)

    def _awake(self) -> Replica | None:
        awake = [replica for replica in self.replicas if not replica.silent]
        return self.random.choice(awake) if awake else None

    def _serving(self) -> Replica | None:
        serving = [replica for replica in self.replicas if replica.version and not replica.silent]
        return self.random.choice(serving) if serving else None


Action: TypeAlias = Callable[[Schedule], None]

ACTIONS: dict[Action, float] = {
    Schedule.lease: 20,
    Schedule.renew: 24,
    Schedule.finish: 44,
    Schedule.fail: 4,
    Schedule.forge: 1,
    Schedule.send_again: 3,
    Schedule.give_back: 1,
    Schedule.install: 10,
    Schedule.sleep: 1.5,
    Schedule.die: 0.7,
    Schedule.lose_engines: 0.7,
    Schedule.train: 24,
    Schedule.take_over: 1.5,
    Schedule.lose_payload: 1,
}


async def _while_busy(who: Any, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    finally:
        who.busy = False


def _stuck(process: Process) -> str:
    state = process.state
    return (
        f"trained {state.trained_step} of {state.last_step}, closed {state.closed}, "
        f"tasks {dict(+state.task_counts)}, episodes {dict(+state.episode_counts)}, "
        f"window {state.window[:9]}, versions {state.newest_version}/{state.num_versions}"
    )
