"""The trainer's hold on the run, and the checkpoints that make its work durable."""

from collections.abc import Iterator

from treadle_core.errors import InvalidFieldError
from treadle_core.versions import VersionState
from treadle_experience.core import groups, retention
from treadle_experience.core.errors import (
    CheckpointRequiredError,
    StepOutOfOrderError,
    UnknownCheckpointError,
    WrongParentError,
)
from treadle_experience.core.run import Run, check_trainer
from treadle_experience.core.state import Checkpoint, Episode, RunState
from treadle_experience.core.transitions import (
    CheckpointCommitted,
    TrainerAcquired,
    VersionAborted,
)


def acquire(run: Run, *, holder: str, checkpoint_digest: str) -> tuple[int, int]:
    """Makes `holder` the only trainer; returns its epoch and the step of its checkpoint.

    What steps beyond the checkpoint did is taken back. Raises CheckpointRequiredError or
    UnknownCheckpointError.
    """
    state = run.state
    epoch = state.acquisitions.get((holder, checkpoint_digest))
    if epoch is not None:
        return epoch, _step_of(state, checkpoint_digest)
    if not checkpoint_digest and state.checkpoints:
        raise CheckpointRequiredError(
            "the run has checkpoints; name the one that was restored",
            field="checkpoint_digest",
            limit=", ".join(checkpoint.digest for checkpoint in state.restorable()),
            value=checkpoint_digest,
        )
    restorable = [checkpoint.digest for checkpoint in state.restorable()]
    if checkpoint_digest and checkpoint_digest not in restorable:
        raise UnknownCheckpointError(
            f"no checkpoint {checkpoint_digest} can be restored in this run",
            field="checkpoint_digest",
            limit=", ".join(restorable),
            value=checkpoint_digest,
        )
    step = _step_of(state, checkpoint_digest)
    for version in list(state.versions.values()):
        if version.state is VersionState.ANNOUNCED:
            run.record(VersionAborted(version.number, f"{holder} acquired the run"))
    run.record(TrainerAcquired(state.trainer_epoch + 1, holder, checkpoint_digest, step))
    return state.trainer_epoch, step


def commit(
    run: Run, *, trainer_epoch: int, digest: str, parent_digest: str, step: int, path: str
) -> list[Checkpoint]:
    """Commits a checkpoint; returns those that must stay restorable, newest first.

    Raises TrainerFencedError, WrongParentError or StepOutOfOrderError.
    """
    state = run.state
    check_trainer(state, trainer_epoch)
    checkpoint = Checkpoint(digest, parent_digest, step, path)
    # Outside the lineage the same bytes may come again: a restored trainer repeats its steps.
    if digest in state.lineage:
        _check_same(state.checkpoints[digest], checkpoint)
        return state.restorable()
    head = state.head()
    if parent_digest != (head.digest if head else ""):
        raise WrongParentError(
            f"checkpoint {digest} does not follow the head of the lineage",
            field="parent_digest",
            limit=head.digest if head else "empty",
            value=parent_digest,
        )
    covered = state.covered_step()
    if not covered <= step <= state.trained_step:
        raise StepOutOfOrderError(
            f"a checkpoint of step {step} does not lie between the head and the last trained step",
            field="step",
            limit=f"{covered} to {state.trained_step}",
            value=step,
        )
    released = state.released_step
    run.record(CheckpointCommitted(digest, parent_digest, step, path, trainer_epoch))
    if not run.rules.keep_payloads:
        groups.release(run, _members(state, released, state.released_step))
    retention.forget(run)
    return state.restorable()


def _members(state: RunState, after: int, through: int) -> Iterator[Episode]:
    for step in range(after + 1, through + 1):
        for task_id in state.steps[step].task_ids:
            yield from state.tasks[task_id].episodes


def _step_of(state: RunState, digest: str) -> int:
    return state.checkpoints[digest].step if digest else 0


def _check_same(recorded: Checkpoint, checkpoint: Checkpoint) -> None:
    for name in ("parent_digest", "step", "path"):
        before, now = getattr(recorded, name), getattr(checkpoint, name)
        if before != now:
            raise InvalidFieldError(name, limit=f"{before} as committed before", value=now)
