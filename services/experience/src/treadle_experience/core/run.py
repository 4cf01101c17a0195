"""A run under decision.

A decision is a function of a `Run` and a command: it checks, records transitions, and answers or
raises a typed error. Recording folds a transition into the state at once, with the same fold that
loads a journal, so the rest of a decision sees what its first part did. Whoever called takes the
recorded transitions to the ledger, and answers once they are durable.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from treadle_core.ids import checked_id
from treadle_core.tickets import Json
from treadle_core.versions import Version, VersionState
from treadle_experience.core.apply import apply
from treadle_experience.core.errors import (
    FilterError,
    StepOutOfOrderError,
    TaskSourceError,
    TrainerFencedError,
    UnknownVersionError,
)
from treadle_experience.core.filters import Filter
from treadle_experience.core.rules import Rules
from treadle_experience.core.state import RunState, Task
from treadle_experience.core.transitions import RunBegan, Transition

Read = Callable[[int], Mapping[str, Json] | None]
"""A TaskSource's `read`."""

_ENCODER = json.JSONEncoder(allow_nan=False)

TRAINING = ""
"""Name of the training source; the others are named as their evaluation set."""


@dataclass(slots=True)
class Run:
    """State, rules and plugins of one run, and what was decided since the last `take`."""

    rules: Rules
    sources: Mapping[str, Read]
    state: RunState = field(default_factory=RunState)
    filter: Filter | None = None
    """Which whole groups are kept; None: all."""
    last_read: tuple[str, int, Mapping[str, Json] | None] | None = None
    """Source, cursor and task of the last `read_task`: who looks ahead asks for it again."""
    _recorded: list[Transition] = field(default_factory=list[Transition])

    def load(self, journal: Iterable[Transition]) -> int:
        """Folds a journal, and begins a run where it is empty; returns how long the journal is.

        Raises InvalidFieldError when the run began under other fixed rules, LedgerFormatError
        when the journal is damaged.
        """
        length = 0
        for transition in journal:
            apply(self.state, transition)
            length += 1
        if self.state.position == 0:
            self.record(RunBegan(self.rules.run_id, self.rules.fixed()))
        self.rules.check_unchanged(self.state.settings)
        return length

    def record(self, transition: Transition) -> None:
        """Makes `transition` happen."""
        apply(self.state, transition)
        self._recorded.append(transition)

    def take(self) -> list[Transition]:
        """What was recorded since the last call, in order."""
        taken, self._recorded = self._recorded, []
        return taken


def read_task(run: Run, source: str, cursor: int) -> Mapping[str, Json] | None:
    """Task `cursor` of a source, or None past its end.

    Raises TaskSourceError when the source raises, or returns what is no JSON object.
    """
    if run.last_read is not None and run.last_read[:2] == (source, cursor):
        return run.last_read[2]
    try:
        spec = run.sources[source](cursor)
        if spec is not None:
            spec = json.loads(_ENCODER.encode(dict(spec)))
    except Exception as error:
        raise TaskSourceError(
            f"the source of {source or 'training'} tasks failed at cursor {cursor}: {error!r}",
            field=f"evaluation.sets.{source}" if source else "source",
            limit="a JSON object",
            value=cursor,
        ) from error
    run.last_read = (source, cursor, spec)
    return spec


def drop_reason(run: Run, task: Task) -> str:
    """Why the run's filter drops a whole group; empty to keep it.

    Raises FilterError when the filter raises, or returns what is no id.
    """
    if run.filter is None:
        return ""
    members = [episode.result for episode in task.members() if episode.result is not None]
    try:
        reason = run.filter(members)
        return checked_id("reason", reason) if reason else ""
    except Exception as error:
        raise FilterError(
            f"the filter failed at task {task.task_id}: {error!r}",
            field="filter",
            limit="one word, or empty",
            value=task.task_id,
        ) from error


def check_trainer(state: RunState, trainer_epoch: int) -> None:
    """Raises TrainerFencedError unless `trainer_epoch` is that of the run's only trainer."""
    if trainer_epoch != state.trainer_epoch:
        raise TrainerFencedError(
            f"trainer_epoch {trainer_epoch} is fenced by epoch {state.trainer_epoch}",
            field="trainer_epoch",
            limit=state.trainer_epoch,
            value=trainer_epoch,
        )


def check_claimed(state: RunState, trainer_epoch: int, step: int) -> None:
    """Raises TrainerFencedError, or StepOutOfOrderError unless `step` is claimed and untrained."""
    check_trainer(state, trainer_epoch)
    if step != state.trained_step + 1 or step not in state.steps:
        raise StepOutOfOrderError(
            f"step {step} is not the claimed step after {state.trained_step}",
            field="step",
            limit=state.trained_step + 1,
            value=step,
        )


def committed_version(state: RunState, field_name: str, number: int) -> Version:
    """The version with this number; raises UnknownVersionError unless it is committed."""
    version = state.version(number)
    if version is None or version.state is not VersionState.COMMITTED:
        raise UnknownVersionError(
            f"{field_name}: version {number} is not registered in this run",
            field=field_name,
            limit=f"a committed version, at most {state.newest_version}",
            value=number,
        )
    return version
