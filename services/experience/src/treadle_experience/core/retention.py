"""Retention: what a run forgets, so that its state does not grow with its age.

Forgotten is only what nothing that can still happen asks for: tasks that are trained, below every
restore and out of reach of the lag bound, or that have left for good; and with them batches,
checkpoints, versions and evaluations. Their counts are kept.
"""

from itertools import takewhile

from treadle_core.versions import VersionState
from treadle_experience.core import groups
from treadle_experience.core.run import Run
from treadle_experience.core.state import LEFT, RunState, Task, TaskState, evaluation_task_id
from treadle_experience.core.transitions import HistoryForgotten


def forget(run: Run) -> None:
    """Forgets the oldest tasks, once twice as many as are to be kept have ended."""
    state, kept = run.state, run.rules.kept_tasks
    ended = sum(state.task_counts[name] for name in (*LEFT, TaskState.CONSUMED))
    if ended - state.forgotten_tasks.total() <= 2 * kept:
        return
    step = max(state.forgotten_step, state.released_step - run.rules.lag_limit - 1)
    settled = list(takewhile(lambda task: _is_settled(state, task, step), state.tasks.values()))
    # The first score is what every later one is compared with.
    tasks = [
        task
        for task in settled[: max(0, len(settled) - kept)]
        if task.evaluation is None or task.evaluation.step
    ]
    if not tasks:
        return
    for task in tasks:
        groups.release(run, [episode for episode in task.episodes if not episode.released])
    task_ids = tuple(task.task_id for task in tasks)
    gone = set(task_ids)
    evaluations = dict.fromkeys(task.evaluation for task in tasks if task.evaluation)
    run.record(
        HistoryForgotten(
            task_ids=task_ids,
            step=step,
            version=_last_version(state, step),
            evaluations=tuple(
                (key.step, key.name)
                for key in evaluations
                if evaluation_task_id(key, state.evaluations[key].size) in gone
            ),
        )
    )


def _is_settled(state: RunState, task: Task, step: int) -> bool:
    """Whether nothing asks for the task once all up to `step` is forgotten."""
    if task.evaluation is not None:
        return (
            task.evaluation.step < step and state.evaluations[task.evaluation].outcome is not None
        )
    return task.step <= step and (task.state in LEFT or task.state is TaskState.CONSUMED)


def _last_version(state: RunState, step: int) -> int:
    """The last version to forget: all up to it have ended, and are of steps before `step`."""
    needed = [state.newest_version]
    needed += [state.evaluations[key].version for key in state.unfinished]
    last = state.forgotten_version
    for number, version in state.versions.items():
        ended = version.state is not VersionState.ANNOUNCED and version.step < step
        if number >= min(needed) or not ended:
            break
        last = number
    return last
