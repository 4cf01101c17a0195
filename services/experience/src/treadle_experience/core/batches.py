"""Batches: forming one from the oldest tasks, mending one that lost members, and the last one."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from treadle_experience.core import evaluation, groups
from treadle_experience.core.rules import Overdue, Rules
from treadle_experience.core.run import Run
from treadle_experience.core.state import LEFT, EpisodeState, RunState, Step, Task, TaskState
from treadle_experience.core.transitions import (
    RunClosed,
    StepClaimed,
    StepReformed,
    StepUnclaimed,
    TrainerStarved,
)

RUN_ENDED = "run_ended"
"""The task was not claimed before the run's last step was trained."""

LAG = "lag"
"""The task has tokens that would be trained later than the lag limit allows."""

OVERDUE = "overdue"
"""The task still ran when a batch could be formed without it, and the recipe evicts such."""

LAST_BATCH = "last_batch"
"""The task was left over when the tasks ended, and the recipe drops such."""


def form(run: Run, step: int) -> None:
    """Forms the batch of a step that has none, or closes the run, where either can be."""
    state, rules = run.state, run.rules
    if step > rules.steps:  # the recipe was shortened between two starts
        close(run, step - 1, RUN_ENDED)
        return
    if rules.overdue is not Overdue.WAIT:
        _evict_stale(run, step)
    chosen = _choose(state, rules)
    if chosen is None:
        if (
            rules.adaptive
            and len(state.window) < rules.tasks_per_step
            and state.starved_step != step
        ):
            run.record(TrainerStarved(step))
        return
    if not chosen:
        close(run, step - 1, RUN_ENDED)
    elif len(chosen) < rules.tasks_per_step and rules.drop_last:
        close(run, step - 1, LAST_BATCH)
    else:
        if rules.overdue is Overdue.EVICT:
            _evict_running(run, before=chosen[-1].order)
        last = step == rules.steps or (state.exhausted and len(chosen) == len(state.window))
        run.record(StepClaimed(step, tuple(task.task_id for task in chosen), last))


def mend(run: Run, step: int) -> None:
    """Takes members that left for good out of the recorded batch of `step`.

    The newest batch is given up, so that forming it anew fills their places, and no others, with
    the next unclaimed tasks. Where a later batch is recorded, or the run is closed, nothing fills
    them, and a batch without members is no step at all.
    """
    state = run.state
    while (recorded := state.steps.get(step)) is not None:
        kept = tuple(id_ for id_ in recorded.task_ids if state.tasks[id_].state not in LEFT)
        if kept == recorded.task_ids:
            return
        if step == state.last_claimed() and not state.closed:
            run.record(StepUnclaimed(step))
        else:
            run.record(StepReformed(step, kept))
            if state.last_step is not None:
                _score_last(run, state.last_step)


def close(run: Run, last_step: int, reason: str) -> None:
    """Ends the run with `last_step`: what was not claimed is evicted, and a last score is due."""
    run.record(RunClosed(last_step))
    for order in list(run.state.window):
        groups.discard(run, run.state.task_of(order), TaskState.EVICTED, reason)
    _score_last(run, last_step)


def is_last(run: Run, step: Step) -> bool:
    """Whether the step is the run's last."""
    return step.last or step.step == run.rules.steps


def upcoming(state: RunState, rules: Rules) -> Iterator[Task]:
    """The tasks that the next batches are formed of, in that order.

    `wait` takes the oldest tasks, whether they run or not; the others what is left of a batch that
    was given up, and then the oldest ready ones.
    """
    window = map(state.task_of, state.window)
    if rules.overdue is Overdue.WAIT:
        return window
    tasks = list(window)
    kept = [task for task in tasks if task.order in state.kept]
    others = [task for task in tasks if task.order not in state.kept]
    return iter(kept + [task for task in others if task.state is TaskState.READY])


def _score_last(run: Run, last_step: int) -> None:
    """Sees to it that the run ends with a score of its last step, and waits for none beyond."""
    evaluation.end_beyond(run, last_step, RUN_ENDED)
    evaluation.open_due(run)


def _choose(state: RunState, rules: Rules) -> list[Task] | None:
    """The members of the next batch, oldest first, fewer than a batch once the tasks have ended.

    None while one of them still runs or is still to come.
    """
    size = rules.tasks_per_step
    chosen = sorted(islice(upcoming(state, rules), size), key=lambda task: task.order)
    if any(task.state is not TaskState.READY for task in chosen):
        return None
    ended = state.exhausted and len(chosen) == len(state.window)
    return chosen if len(chosen) == size or ended else None


def _evict_stale(run: Run, step: int) -> None:
    """Evicts the tasks with tokens that `step`, and so every later one, would train too late."""
    state = run.state
    for order in list(state.window):
        task = state.task_of(order)
        found = filter(None, map(state.version, _versions(task)))
        oldest = min((version.step for version in found), default=step)
        if step - 1 - oldest > run.rules.lag_limit:
            groups.discard(run, task, TaskState.EVICTED, LAG)


def _versions(task: Task) -> Iterator[int]:
    """Versions of the tokens that a task has; of a running member, what it was leased for."""
    for episode in task.episodes:
        if episode.result is not None:
            yield from episode.result.versions
        elif episode.state is EpisodeState.ISSUED:
            yield episode.version


def _evict_running(run: Run, *, before: int) -> None:
    """Evicts the tasks that still run and are older than the one opened as number `before`."""
    for order in run.state.window[: bisect_left(run.state.window, before)]:
        task = run.state.task_of(order)
        if task.state is TaskState.OPEN:
            groups.discard(run, task, TaskState.EVICTED, OVERDUE)
