"""Policy versions: publication numbers, and which of them engines may serve."""

from treadle_core.errors import InvalidFieldError
from treadle_core.versions import Version, VersionState
from treadle_experience.core import evaluation
from treadle_experience.core.errors import (
    StepOutOfOrderError,
    VersionEndedError,
    VersionNotFoundError,
)
from treadle_experience.core.run import Run, check_trainer
from treadle_experience.core.state import RunState
from treadle_experience.core.transitions import (
    VersionAborted,
    VersionAnnounced,
    VersionCommitted,
)


def announce(run: Run, *, trainer_epoch: int, step: int, request_id: str, trace_id: str) -> int:
    """Gives out the next publication number.

    Raises TrainerFencedError or StepOutOfOrderError.
    """
    state = run.state
    check_trainer(state, trainer_epoch)
    if request_id in state.version_requests:
        version = state.versions[state.version_requests[request_id]]
        if version.step != step:
            raise InvalidFieldError("step", limit=f"{version.step} as announced before", value=step)
        return version.number
    if step > state.trained_step:
        raise StepOutOfOrderError(
            f"step {step} cannot be published: step {state.trained_step} is the last one trained",
            field="step",
            limit=f"at most {state.trained_step}",
            value=step,
        )
    number = state.num_versions + 1
    run.record(VersionAnnounced(number, step, trainer_epoch, request_id, trace_id))
    return number


def commit(run: Run, *, trainer_epoch: int, number: int, weights_digest: str) -> None:
    """Commits an announced version, and opens the evaluations that it is due for.

    Raises TrainerFencedError, VersionEndedError or VersionNotFoundError.
    """
    state = run.state
    check_trainer(state, trainer_epoch)
    version = _find(state, number)
    if version.state is VersionState.COMMITTED and number > state.forgotten_version:
        if version.weights_digest != weights_digest:
            raise InvalidFieldError(
                "weights_digest",
                limit=f"{version.weights_digest} as committed before",
                value=weights_digest,
            )
        return
    if version.state is VersionState.ABORTED or number < state.newest_version:
        raise _ended(version, state)
    run.record(VersionCommitted(number, weights_digest))
    evaluation.open_due(run)


def abort(run: Run, *, number: int, message: str) -> None:
    """Gives up an announced version. Raises VersionEndedError or VersionNotFoundError."""
    version = _find(run.state, number)
    if version.state is VersionState.COMMITTED:
        raise _ended(version, run.state)
    if version.state is VersionState.ANNOUNCED:
        run.record(VersionAborted(number, message))


def _find(state: RunState, number: int) -> Version:
    version = state.version(number)
    if version is None:
        raise VersionNotFoundError(
            f"version {number} was never announced",
            field="version",
            limit=f"at most {state.num_versions}",
            value=number,
        )
    return version


def _ended(version: Version, state: RunState) -> VersionEndedError:
    return VersionEndedError(
        f"version {version.number} is {version.state.value}; "
        f"the newest committed one is {state.newest_version}",
        field="version",
        limit=f"announced, and newer than {state.newest_version}",
        value=version.number,
    )
