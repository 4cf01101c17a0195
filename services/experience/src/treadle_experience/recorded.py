"""The groups that a run trained on, as its journal tells them, to be trained on elsewhere."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from treadle_experience.core import steps
from treadle_experience.core.apply import apply
from treadle_experience.core.state import RunState, Task, TaskState
from treadle_experience.core.steps import ClaimedTask
from treadle_experience.core.transitions import (
    StepTrained,
    TrainerAcquired,
    Transition,
    WithPayload,
)


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step as it was trained."""

    step: int
    last: bool
    metrics: Mapping[str, float]
    """As the trainer reported them; empty where the ledger has forgotten them."""
    tasks: tuple[ClaimedTask, ...]
    """In recorded order, which the trainer followed."""


@dataclass(slots=True)
class Recorded:
    """What a run's ledger remembers of its groups."""

    run_id: str = ""
    trained_step: int = 0
    steps: dict[int, RecordedStep] = field(default_factory=dict[int, RecordedStep])
    """Those of the lineage, by number; what was forgotten is absent."""
    ready: list[ClaimedTask] = field(default_factory=list[ClaimedTask])
    """Whole groups that were not trained on, oldest first."""
    inline: dict[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    """Payload of an episode where the ledger holds it; None once it was released."""


def recorded(journal: Iterable[Transition]) -> Recorded:
    """Folds a journal."""
    state, found = RunState(), Recorded()
    for transition in journal:
        apply(state, transition)
        if isinstance(transition, StepTrained):
            found.steps[transition.step] = _step(state, transition.step, transition.metrics)
        elif isinstance(transition, TrainerAcquired):
            found.steps = {n: each for n, each in found.steps.items() if n <= transition.step}
        elif isinstance(transition, WithPayload):
            found.inline[transition.episode_id] = transition.inline
    for number in state.steps.keys() - found.steps.keys():
        if number <= state.trained_step:
            found.steps[number] = _step(state, number, {})
    found.run_id, found.trained_step = state.run_id, state.trained_step
    untrained = (TaskState.READY, TaskState.CLAIMED)
    found.ready = [
        _task(state, task, state.trained_step + 1)
        for task in state.tasks.values()
        if task.state in untrained and task.evaluation is None
    ]
    return found


def _step(state: RunState, number: int, metrics: Mapping[str, float]) -> RecordedStep:
    batch = state.steps[number]
    tasks = tuple(_task(state, state.tasks[id_], number) for id_ in batch.task_ids)
    return RecordedStep(number, batch.last, metrics, tasks)


def _task(state: RunState, task: Task, step: int) -> ClaimedTask:
    """As it is now; what becomes of it later changes nothing here."""
    members = [replace(episode, inline=None) for episode in task.members()]
    oldest = [steps.oldest_step(state, step, episode) for episode in members]
    return ClaimedTask(task.task_id, tuple(zip(members, oldest, strict=True)))
