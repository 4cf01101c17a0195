"""Lives of an experience process: the real keeper and servicer on a ledger that survives them."""

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ledger_model.clock import VirtualLoop
from treadle_experience.core.errors import LedgerFullError
from treadle_experience.core.filters import Filter
from treadle_experience.core.rules import Rules
from treadle_experience.core.run import Read, Run
from treadle_experience.core.state import RunState
from treadle_experience.core.transitions import EpisodeDone, Transition
from treadle_experience.effects import Effects
from treadle_experience.keeper import Keeper
from treadle_experience.ports import Ledger
from treadle_experience.servicer import ExperienceServicer
from treadle_payloads.store import PayloadStore


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
    crash: str = ""
    """`before` or `after`: the next append dies, before or after it has stored."""
    full: int = 0
    """Appends that find no room."""
    dead: bool = False

    def acquire(self, run_id: str) -> int:
        return self.ledger.acquire(run_id)

    def load(self) -> Iterable[Transition]:
        return self.ledger.load()

    def append(self, transitions: Sequence[Transition], writer_epoch: int) -> None:
        if self.dead or self.crash == "before":
            self.dead = True
            raise CrashedError
        if self.full:
            self.full -= 1
            raise LedgerFullError("no room")
        self.ledger.append(transitions, writer_epoch)
        self.stored += transitions
        if self.crash == "after":
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
        effects = Effects(self.run.state, self.store, NoTracker())
        self.keeper = Keeper(
            self.run, self.session, on_durable=effects.follow, clock=self.loop.time
        )
        self.servicer = ExperienceServicer(self.keeper, self.rules, self.store)
        self._background = [
            self.loop.create_task(self.keeper.write()),
            self.loop.create_task(self.keeper.sweep()),
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


def reloaded(process: Process) -> RunState:
    """The state of another process that reads the same ledger now."""
    run = Run(process.rules, process.sources, filter=process.filter)
    run.load(process.session.load())
    return run.state


def differences(one: RunState, other: RunState) -> list[str]:
    """What two states say differently, by field."""
    if one == other:
        return []
    return [
        f"{name}: {getattr(one, name)} / {getattr(other, name)}"
        for name in (each.name for each in fields(one))
        if getattr(one, name) != getattr(other, name)
    ]


def bare(transitions: Iterable[Transition]) -> list[Transition]:
    """Transitions without payload bytes, which a ledger may have released."""
    return [
        replace(each, inline=None) if isinstance(each, EpisodeDone) else each
        for each in transitions
    ]
