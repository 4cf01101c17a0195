"""Lives of an experience process: the real keeper and servicer on a ledger that survives them."""

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ledger_model.clock import VirtualLoop
from ledger_model.oracle import BreachError
from treadle_experience.core.apply import apply
from treadle_experience.core.errors import LedgerFullError, WriterFencedError
from treadle_experience.core.filters import Filter
from treadle_experience.core.rules import Rules
from treadle_experience.core.run import Read, Run
from treadle_experience.core.state import RunState
from treadle_experience.core.transitions import HistoryForgotten, Transition
from treadle_experience.custody import Custody
from treadle_experience.effects import Effects
from treadle_experience.keeper import Keeper
from treadle_experience.payloads import inline_limit
from treadle_experience.ports import Durability, Ledger, Snapshot
from treadle_experience.servicer import ExperienceServicer
from treadle_payloads.store import PayloadStore
from treadle_runtime.doorbells.poll import PollDoorbell


class LostError(Exception):
    """A call got no answer: it may have been decided, stored, both or neither."""


class CrashedError(Exception):
    """The process died in an append."""


class NoTracker:
    """A Tracker that keeps nothing."""

    def log(self, name: str, values: object) -> None:
        pass


@dataclass
class Session:
    """A Ledger as one process sees it, until it dies."""

    ledger: Ledger
    stored: list[Transition]
    """What every life has stored, in order: kept apart from the ledger."""
    forgotten: set[str]
    """Tasks that were forgotten by then."""
    crash: str = ""
    """`before` or `after`: the next append dies, before or after it has stored. The same with
    `_condensing`: the next condensation, or it is `late`."""
    full: int = 0
    """Writes that find no room."""
    condensed: int = 0
    late: list[tuple[Sequence[Transition], int, int]] = field(default_factory=list)
    """Condensations that are still on their way when the process is dead: `late_condensing`."""
    dead: bool = False

    @property
    def durability(self) -> Durability:
        return self.ledger.durability

    def acquire(self, run_id: str) -> int:
        return self.ledger.acquire(run_id)

    def load(self) -> Iterable[Transition]:
        return self.ledger.load()

    def append(self, transitions: Sequence[Transition], writer_epoch: int) -> None:
        with self._dying("before", "after"):
            self.ledger.append(transitions, writer_epoch)
            self.stored += transitions
            for each in transitions:
                if isinstance(each, HistoryForgotten):
                    self.forgotten.update(each.task_ids)

    def condense(self, head: Sequence[Transition], position: int, writer_epoch: int) -> None:
        if self.crash == "late_condensing" and not self.dead:
            self.late.append((head, position, writer_epoch))
            self.crash = "before_condensing"
        with self._dying("before_condensing", "after_condensing"):
            self.ledger.condense(head, position, writer_epoch)
            self.condensed += 1

    def arrive(self) -> None:
        """The condensations that are on their way arrive, now that there is a successor."""
        for each in self.late:
            try:
                self.ledger.condense(*each)
            except WriterFencedError:
                continue
            raise BreachError("a writer that has a successor is fenced")

    def read(self) -> Snapshot:
        return self.ledger.read()

    @contextlib.contextmanager
    def _dying(self, before: str, after: str) -> Iterator[None]:
        if self.dead or self.crash == before:
            self.dead = True
            raise CrashedError
        if self.full:
            self.full -= 1
            raise LedgerFullError("no room")
        yield
        if self.crash == after:
            self.dead = True
            raise CrashedError

    def close(self) -> None:
        """The ledger outlives its sessions."""


@dataclass
class Process:
    """One life of the service."""

    loop: VirtualLoop
    session: Session
    rules: Rules
    sources: Mapping[str, Read]
    filter: Filter | None
    store: PayloadStore
    _calls: set[asyncio.Task[Any]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.run = Run(self.rules, self.sources, filter=self.filter)
        effects = Effects(self.run.state, NoTracker(), PollDoorbell(run_id="run"))
        self.keeper = Keeper(
            self.run, self.session, on_durable=effects.follow, clock=self.loop.time
        )
        limit = inline_limit(self.rules.tasks_per_step * self.rules.group_size)
        self.custody = Custody(self.keeper, self.store, effects.released, limit=limit)
        self.servicer = ExperienceServicer(self.keeper, self.rules, self.custody)
        self._background = [
            self.loop.create_task(self.keeper.write()),
            self.loop.create_task(self.keeper.sweep()),
            self.loop.create_task(self.custody.release()),
        ]

    @property
    def state(self) -> RunState:
        return self.run.state

    def is_quiet(self) -> bool:
        """Whether all that was decided is stored."""
        return not self.session.dead and self.keeper.position == self.state.position

    def failure(self) -> BaseException | None:
        """What ended a task that should run forever; a planned crash is none."""
        for task in self._background:
            if task.done() and not task.cancelled() and not self.session.dead:
                return task.exception()
        return None

    async def call(self, method: str, request: Any) -> Any:
        """Calls the service; raises LostError where the process dies before it answers."""
        if self.session.dead:
            raise LostError
        task = self.loop.create_task(getattr(self.servicer, method)(request, None))
        self._calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            raise LostError from None
        finally:
            self._calls.discard(task)

    def kill(self) -> None:
        """Ends it; what was not stored is gone, and nobody who waits is answered."""
        self.session.dead = True
        for task in [*self._calls, *self._background]:
            task.cancel()
        for task in self._background:
            with contextlib.suppress(BaseException):
                self.loop.run_until_complete(task)
        self.keeper.close()
        self.custody.close()


def reloaded(process: Process) -> RunState:
    """The state of another process that reads the same ledger now."""
    return folded(process.session.load())


def folded(journal: Iterable[Transition]) -> RunState:
    """The state that a journal is."""
    state = RunState()
    for transition in journal:
        apply(state, transition)
    return state


def differences(one: RunState, other: RunState) -> list[str]:
    """What two states say differently, by field."""
    if one == other:
        return []
    return [
        f"{name}: {getattr(one, name)} / {getattr(other, name)}"
        for name in (each.name for each in fields(one))
        if getattr(one, name) != getattr(other, name)
    ]
