"""What the next claims will probably hold. Nothing is decided here, and nothing promised."""

from dataclasses import dataclass
from itertools import islice

from treadle_experience.core import batches, steps
from treadle_experience.core.run import Run
from treadle_experience.core.state import Task, TaskState


@dataclass(frozen=True, slots=True)
class PreviewedStep:
    """A step to come, and its members as far as they are known."""

    step: int
    tasks: tuple[steps.ClaimedTask, ...]
    """With the episodes that are done; in recorded order, else oldest first."""
    ready: bool
    """Every member is there."""


def preview(run: Run, *, max_steps: int) -> list[PreviewedStep]:
    """The steps that are recorded and not trained, then up to `max_steps` that are not recorded.

    Of these no more than `max_lag`: what is sampled further ahead may not be trained.
    """
    state = run.state
    recorded = range(state.trained_step + 1, state.last_claimed() + 1)
    found = [
        _previewed(run, step, [state.tasks[id_] for id_ in state.steps[step].task_ids])
        for step in recorded
        if step in state.steps
    ]
    size = run.rules.tasks_per_step
    coming = batches.upcoming(state, run.rules)
    first = recorded.stop
    for step in range(first, min(first + min(max_steps, run.rules.max_lag), run.rules.steps + 1)):
        tasks = list(islice(coming, size))
        if tasks:
            found.append(_previewed(run, step, tasks, missing=size - len(tasks)))
    return found


def _previewed(run: Run, step: int, tasks: list[Task], *, missing: int = 0) -> PreviewedStep:
    ready = not missing and all(task.state is not TaskState.OPEN for task in tasks)
    return PreviewedStep(step, tuple(_members(run, task, step) for task in tasks), ready)


def _members(run: Run, task: Task, step: int) -> steps.ClaimedTask:
    members = task.members()
    oldest = [steps.oldest_step(run.state, step, episode) for episode in members]
    return steps.ClaimedTask(task.task_id, tuple(zip(members, oldest, strict=True)))
