"""The fold of what is forgotten. What that is, `retention` decides."""

from treadle_experience.core.state import EvaluationKey, RunState
from treadle_experience.core.transitions import HistoryForgotten


def forget_history(transition: HistoryForgotten, state: RunState) -> None:
    """Drops records; all counts go on counting what they were of."""
    for task_id in transition.task_ids:
        task = state.tasks.pop(task_id)
        for episode in task.episodes:
            del state.episodes[episode.episode_id]
        state.forgotten_tasks[task.state] += 1
        state.forgotten_results[task.state] += len(task.members())
    for step, name in transition.evaluations:
        del state.evaluations[EvaluationKey(step, name)]
        state.finished.remove(EvaluationKey(step, name))
    for number in range(state.forgotten_version + 1, transition.version + 1):
        del state.versions[number]
    state.forgotten_version = transition.version
    state.version_requests = {
        id_: number for id_, number in state.version_requests.items() if number > transition.version
    }
    _forget_steps(state, transition.step)


def _forget_steps(state: RunState, last: int) -> None:
    for step in range(state.forgotten_step + 1, last + 1):
        del state.steps[step]
    del state.claimed_through[: last - state.forgotten_step]
    state.forgotten_step = last
    state.checkpoints = {d: each for d, each in state.checkpoints.items() if each.step >= last}
    state.lineage = [digest for digest in state.lineage if digest in state.checkpoints]
    state.acquisitions = {
        (holder, digest): epoch
        for (holder, digest), epoch in state.acquisitions.items()
        if digest in state.checkpoints or (not digest and epoch == state.trainer_epoch)
    }
