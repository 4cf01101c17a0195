"""Steps: claiming a batch, reporting it trained, and how the run ends."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_experience.core import evaluation, tickets
from treadle_experience.core.errors import LagBrokenError, StepOutOfOrderError
from treadle_experience.core.run import Run, check_trainer
from treadle_experience.core.state import Episode, Step, Task, TaskState
from treadle_experience.core.transitions import RunClosed, StepClaimed, StepTrained

RUN_ENDED = "run_ended"
"""The task was not claimed before the run's last step was trained."""

LAST_BATCH = "last_batch"
"""The task was left over when the tasks ended, and the recipe drops such."""


@dataclass(frozen=True, slots=True)
class ClaimedTask:
    """A member of a batch: its episodes, each with the oldest step among its tokens' versions."""

    task_id: str
    episodes: tuple[tuple[Episode, int], ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim; all empty while the batch is not ready."""

    tasks: tuple[ClaimedTask, ...] = ()
    last: bool = False
    """The step is the run's last."""
    complete: bool = False
    """The step is beyond the last one."""


def claim(run: Run, *, trainer_epoch: int, step: int) -> Claim:
    """The batch of `step`: as recorded, or else formed now from the oldest tasks.

    Raises TrainerFencedError or StepOutOfOrderError, and LagBrokenError when admission failed.
    """
    state = run.state
    check_trainer(state, trainer_epoch)
    if step != state.trained_step + 1:
        raise StepOutOfOrderError(
            f"step {step} cannot be claimed after step {state.trained_step}",
            field="step",
            limit=state.trained_step + 1,
            value=step,
        )
    if step not in state.steps and not state.closed:
        _form(run, step)
    recorded = state.steps.get(step)
    if recorded is None:
        return Claim(complete=state.closed)
    tasks = tuple(_claimed(run, state.tasks[task_id], step) for task_id in recorded.task_ids)
    return Claim(tasks, last=_is_last(run, recorded))


def report(
    run: Run, *, trainer_epoch: int, step: int, metrics: Mapping[str, float], trace_id: str
) -> None:
    """Records a claimed step as trained; the first report in a lineage wins.

    Raises TrainerFencedError or StepOutOfOrderError.
    """
    state = run.state
    check_trainer(state, trainer_epoch)
    if 1 <= step <= state.trained_step:
        return
    if step != state.trained_step + 1 or step not in state.steps:
        raise StepOutOfOrderError(
            f"step {step} is not the claimed step after {state.trained_step}",
            field="step",
            limit=state.trained_step + 1,
            value=step,
        )
    run.record(StepTrained(step, trainer_epoch, metrics, trace_id))
    if _is_last(run, state.steps[step]) and not state.closed:
        _close(run, step, RUN_ENDED)


def is_complete(run: Run) -> bool:
    """Whether all is done: trained, durable, and evaluated at the last step."""
    state = run.state
    head = state.head()
    return (
        state.closed
        and head is not None
        and state.last_step is not None
        and head.step >= state.last_step
        and evaluation.final_is_scored(run)
    )


def _form(run: Run, step: int) -> None:
    """Forms the batch of a step never claimed before, or closes the run, where either can be."""
    state, rules = run.state, run.rules
    if step > rules.steps:  # the recipe was shortened between two starts
        _close(run, step - 1, RUN_ENDED)
        return
    tasks = [state.task_of(order) for order in state.window[: rules.tasks_per_step]]
    short = len(tasks) < rules.tasks_per_step
    if short and not state.exhausted:
        return
    if not tasks:
        _close(run, step - 1, RUN_ENDED)
        return
    if any(task.state is not TaskState.READY for task in tasks):
        return
    if short and rules.drop_last:
        _close(run, step - 1, LAST_BATCH)
        return
    last = step == rules.steps or (state.exhausted and len(tasks) == len(state.window))
    run.record(StepClaimed(step, tuple(task.task_id for task in tasks), last))


def _close(run: Run, last_step: int, reason: str) -> None:
    """Ends the run with `last_step`: what was not claimed is evicted, and a last score is due."""
    run.record(RunClosed(last_step))
    for order in list(run.state.window):
        tickets.discard(run, run.state.task_of(order), TaskState.EVICTED, reason)
    evaluation.open_due(run)


def _is_last(run: Run, step: Step) -> bool:
    return step.last or step.step == run.rules.steps


def _claimed(run: Run, task: Task, step: int) -> ClaimedTask:
    return ClaimedTask(
        task.task_id,
        tuple((episode, _oldest_step(run, step, episode)) for episode in task.episodes),
    )


def _oldest_step(run: Run, step: int, episode: Episode) -> int:
    """Oldest step among the versions of the episode's tokens, checked against the lag bound."""
    versions = run.state.versions
    numbers = episode.result.versions if episode.result else ()
    oldest = min((versions[number].step for number in numbers), default=step - 1)
    lag = step - 1 - oldest
    if lag > run.rules.max_lag:
        raise LagBrokenError(
            f"step {step}: episode {episode.episode_id} lags {lag} steps",
            field="max_lag",
            limit=run.rules.max_lag,
            value=lag,
        )
    return oldest
