"""What a trainer found wrong with a claimed batch: lost payloads, and episodes unfit to train."""

from collections.abc import Sequence

from treadle_core.faults import Fault, FaultReason
from treadle_experience.core import groups
from treadle_experience.core.errors import UnknownEpisodeError
from treadle_experience.core.run import Run, check_claimed
from treadle_experience.core.state import Episode, EpisodeState, Task, TaskState
from treadle_experience.core.tickets import MESSAGE_LIMIT
from treadle_experience.core.transitions import EpisodeLost, TaskMoved

UNFIT = "unfit"
"""The trainer could read an episode of the task, and not train on it."""


def hand_back(run: Run, *, trainer_epoch: int, step: int, faults: Sequence[Fault]) -> None:
    """Takes a claimed batch back; the next claim of the step answers it mended.

    A lost episode is issued again, its task keeps its place; a quarantined one ends its task. A
    fault that was handed back before is passed over. Raises TrainerFencedError,
    StepOutOfOrderError, or UnknownEpisodeError, and then nothing has happened.
    """
    check_claimed(run.state, trainer_epoch, step)
    found = [(fault, _find(run, step, fault)) for fault in faults]
    for fault, episode in found:
        task = run.state.tasks[episode.task_id]
        if episode.attempt != fault.attempt or episode.state is not EpisodeState.DONE:
            continue
        if task.state is TaskState.QUARANTINED:
            continue
        if fault.reason is FaultReason.PAYLOAD_LOST:
            _lose(run, episode, fault.message)
        else:
            _quarantine(run, task, episode, fault.message)


def _find(run: Run, step: int, fault: Fault) -> Episode:
    episode = run.state.episodes.get(fault.episode_id)
    if (
        episode is None
        or run.state.tasks[episode.task_id].step != step
        or fault.attempt > episode.attempt
    ):
        raise UnknownEpisodeError(
            f"episode {fault.episode_id}: attempt {fault.attempt} is not in the batch of step "
            f"{step}",
            field="faults",
            limit=f"attempts in the batch of step {step}",
            value=f"{fault.episode_id}/{fault.attempt}",
        )
    return episode


def _lose(run: Run, episode: Episode, message: str) -> None:
    # What is left of the payload goes, so that the next attempt may bring the same bytes.
    groups.release(run, [episode])
    run.record(EpisodeLost(episode.episode_id, episode.attempt, message[:MESSAGE_LIMIT]))


def _quarantine(run: Run, task: Task, culprit: Episode, message: str) -> None:
    """The culprit's payload is kept, for whoever looks into it."""
    cut = message[:MESSAGE_LIMIT]
    run.record(TaskMoved(task.task_id, TaskState.QUARANTINED, UNFIT, cut))
    groups.release(run, [episode for episode in task.episodes if episode is not culprit])
