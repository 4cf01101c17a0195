"""Steps: claiming a batch, reporting it trained, and how the run ends."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_experience.core import batches, evaluation
from treadle_experience.core.errors import LagBrokenError, StepOutOfOrderError
from treadle_experience.core.run import Run, check_claimed, check_trainer
from treadle_experience.core.state import Episode, RunState, Task, TaskState
from treadle_experience.core.transitions import StepTrained

BUDGET_SHARE = 0.8
"""Share of the payload budget from which a checkpoint is asked for."""


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
    batches.mend(run, step)
    if step not in state.steps and not state.closed:
        batches.form(run, step)
    recorded = state.steps.get(step)
    if recorded is None:
        return Claim(complete=state.closed)
    members = [state.tasks[task_id] for task_id in recorded.task_ids]
    if any(task.state is TaskState.OPEN for task in members):
        return Claim()
    tasks = tuple(_claimed(run, task, step) for task in members)
    return Claim(tasks, last=batches.is_last(run, recorded))


def report(
    run: Run, *, trainer_epoch: int, step: int, metrics: Mapping[str, float], trace_id: str
) -> bool:
    """Records a claimed step as trained; the first report in a lineage wins.

    Whether the payloads that wait for a checkpoint ask for one now.

    Raises TrainerFencedError or StepOutOfOrderError.
    """
    state = run.state
    check_trainer(state, trainer_epoch)
    if 1 <= step <= state.trained_step:
        return _budget_is_short(run)
    check_claimed(state, trainer_epoch, step)
    recorded = state.steps[step]
    if any(state.tasks[id_].state is not TaskState.CLAIMED for id_ in recorded.task_ids):
        raise StepOutOfOrderError(
            f"the batch of step {step} was handed back and not claimed again",
            field="step",
            limit="a claimed step",
            value=step,
        )
    run.record(StepTrained(step, trainer_epoch, metrics, trace_id))
    if batches.is_last(run, recorded) and not state.closed:
        batches.close(run, step, batches.RUN_ENDED)
    return _budget_is_short(run)


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


def _budget_is_short(run: Run) -> bool:
    state, budget = run.state, run.rules.payload_budget_bytes
    return (
        budget is not None
        and not run.rules.keep_payloads
        and state.covered_step() < state.trained_step
        and state.payload_bytes >= BUDGET_SHARE * budget
    )


def _claimed(run: Run, task: Task, step: int) -> ClaimedTask:
    return ClaimedTask(
        task.task_id,
        tuple((episode, _oldest_step(run, step, episode)) for episode in task.members()),
    )


def _oldest_step(run: Run, step: int, episode: Episode) -> int:
    """As `oldest_step`, checked against the lag bound."""
    oldest = oldest_step(run.state, step, episode)
    lag = step - 1 - oldest
    if lag > run.rules.lag_limit:
        raise LagBrokenError(
            f"step {step}: episode {episode.episode_id} lags {lag} steps",
            field="max_lag",
            limit=run.rules.lag_limit,
            value=lag,
        )
    return oldest


def oldest_step(state: RunState, step: int, episode: Episode) -> int:
    """Oldest step among the versions of the episode's tokens; the one before `step` for none."""
    numbers = episode.result.versions if episode.result else ()
    found = filter(None, map(state.version, numbers))
    return min((version.step for version in found), default=step - 1)
