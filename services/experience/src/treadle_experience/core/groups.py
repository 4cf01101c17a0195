"""Groups: when the members of a task suffice, and how a task leaves for good."""

from collections.abc import Iterable

from treadle_experience.core import evaluation
from treadle_experience.core.run import Run, drop_reason
from treadle_experience.core.state import Cause, Episode, EpisodeState, Task, TaskState
from treadle_experience.core.transitions import PayloadsReleased, TaskMoved

INCOMPLETE_GROUP = "incomplete_group"
"""Too many members of the task ran out of retries."""


def settle(run: Run, task: Task) -> None:
    """Moves an open task on, once its members have all ended or too many of them have failed."""
    states = [episode.state for episode in task.episodes]
    done = states.count(EpisodeState.DONE)
    live = states.count(EpisodeState.WAITING) + states.count(EpisodeState.ISSUED)
    if done + live < (run.rules.enough if task.evaluation is None else 1):
        inexact = task.episodes[0].ended is Cause.SPANNED
        discard(run, task, TaskState.FILTERED, evaluation.INEXACT if inexact else INCOMPLETE_GROUP)
    elif live:
        return
    elif task.evaluation is not None:
        run.record(TaskMoved(task.task_id, TaskState.SCORED))
    elif task.step:  # it was kept when its batch was formed
        run.record(TaskMoved(task.task_id, TaskState.CLAIMED))
    elif reason := drop_reason(run, task):
        discard(run, task, TaskState.FILTERED, reason)
    else:
        run.record(TaskMoved(task.task_id, TaskState.READY))
    if task.evaluation is not None:
        evaluation.close_if_done(run, task.evaluation)


def discard(run: Run, task: Task, state: TaskState, reason: str) -> None:
    """Moves a task out for good, and releases the payloads that it has."""
    run.record(TaskMoved(task.task_id, state, reason))
    release(run, task.episodes)


def release(run: Run, episodes: Iterable[Episode]) -> None:
    """Records that the payloads and media of these episodes are not needed again."""
    done = [(each.episode_id, each.result) for each in episodes if each.result is not None]
    if done:
        held = [(id_, key, node) for id_, result in done for key, node in result.stored()]
        run.record(
            PayloadsReleased(
                tuple(id_ for id_, _ in done),
                stored=tuple(key for _, key, _ in held),
                held=tuple((node, id_) for id_, _, node in held),
            )
        )
