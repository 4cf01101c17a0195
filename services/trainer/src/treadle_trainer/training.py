"""From a claimed batch to a step: reads and checks its episodes, trains, finds who spoils it."""

from collections.abc import Sequence

from treadle_core.episodes import Episode, Group
from treadle_core.errors import (
    InvalidFieldError,
    Kind,
    PayloadCorruptError,
    PayloadMissingError,
    TreadleError,
)
from treadle_core.faults import Fault, FaultReason
from treadle_trainer.core.claims import (
    Claim,
    ClaimedEpisode,
    ClaimedTask,
    checked_episode,
)
from treadle_trainer.core.culprits import culprits
from treadle_trainer.core.packing import Example
from treadle_trainer.core.step import NonFiniteStepError, StepResult, is_finite, train_step, weigh
from treadle_trainer.ports import Backend, PayloadReader
from treadle_trainer.recipe import Recipe

MOST_PROBES = 64
"""Passes over parts of a batch that a search for culprits may take."""

_NAMED = 10
"""Faults that an error's message names."""


class BatchFaultyError(TreadleError):
    """Episodes of a batch cannot be trained on. Nothing was changed."""

    kind = Kind.CORRUPT
    reason = "BATCH_FAULTY"

    def __init__(self, faults: Sequence[Fault]) -> None:
        named = "; ".join(f"{f.episode_id}/{f.attempt}: {f.message}" for f in faults[:_NAMED])
        super().__init__(
            f"{len(faults)} episodes cannot be trained on: {named}",
            field="episodes",
            limit="all fit to be trained on",
            value=len(faults),
        )
        self.faults = tuple(faults)


class StepFailedError(TreadleError):
    """A step could not be computed; the message names its episodes. Nothing was changed."""

    kind = Kind.BROKEN
    reason = "STEP_FAILED"


def train(
    claim: Claim, *, step: int, recipe: Recipe, backend: Backend, payloads: PayloadReader
) -> StepResult:
    """Trains the step of a claim.

    Raises BatchFaultyError where episodes are in the way, and StepFailedError where every task by
    itself makes loss or gradient no number, since then no batch would do.
    """
    groups = read_groups(claim, recipe=recipe, backend=backend, payloads=payloads)
    try:
        return train_step(
            backend,
            groups,
            advantage=recipe.advantage,
            loss=recipe.loss,
            settings=recipe.settings,
            learning_rate=recipe.schedule(step),
        )
    except NonFiniteStepError as error:
        raise _cause(claim, groups, error, step=step, recipe=recipe, backend=backend) from error


def read_groups(
    claim: Claim, *, recipe: Recipe, backend: Backend, payloads: PayloadReader
) -> list[Group]:
    """Reads and checks every episode of a claim; raises BatchFaultyError naming all bad ones."""
    faults: list[Fault] = []
    groups: list[Group] = []
    for task in claim.tasks:
        episodes: list[Episode] = []
        for claimed in task.episodes:
            read = _read(claimed, recipe=recipe, backend=backend, payloads=payloads)
            if isinstance(read, Fault):
                faults.append(read)
            else:
                episodes.append(read)
        groups.append(Group(task.task_id, tuple(episodes)))
    if faults:
        raise BatchFaultyError(faults)
    return groups


def _read(
    claimed: ClaimedEpisode, *, recipe: Recipe, backend: Backend, payloads: PayloadReader
) -> Episode | Fault:
    try:
        episode = checked_episode(
            claimed,
            payloads.read(claimed),
            vocab_size=backend.vocab_size,
            max_tokens=recipe.settings.microbatch_tokens,
        )
        for segment in episode.segments:
            Example.of(segment, 0.0)  # what cannot be shifted is found here, not in the step
    except (PayloadMissingError, PayloadCorruptError) as error:
        return _fault(claimed, FaultReason.PAYLOAD_LOST, error.message)
    except InvalidFieldError as error:
        return _fault(claimed, FaultReason.QUARANTINED, error.message)
    return episode


def _cause(
    claim: Claim,
    groups: Sequence[Group],
    error: NonFiniteStepError,
    *,
    step: int,
    recipe: Recipe,
    backend: Backend,
) -> TreadleError:
    """Why a step is no number: tasks that are none by themselves, or else all of it."""

    def is_bad(part: Sequence[tuple[ClaimedTask, Group]]) -> bool:
        return not is_finite(
            backend,
            [group for _, group in part],
            advantage=recipe.advantage,
            loss=recipe.loss,
            settings=recipe.settings,
        )

    pairs = list(zip(claim.tasks, groups, strict=True))
    trained = [pair for pair in pairs if weigh(pair[1], recipe.advantage)]
    found = culprits(trained, is_bad=is_bad, max_probes=MOST_PROBES)
    members = [episode for task, _ in found for episode in task.episodes]
    if len(found) == len(trained) > 1:
        names = ", ".join(f"{e.episode_id}/{e.attempt}" for e in members)
        return StepFailedError(
            f"step {step}: {error.message} with each part of the batch; episodes {names}",
            field=error.field,
            limit=error.limit,
            value=error.value,
        )
    return BatchFaultyError(
        [_fault(e, FaultReason.QUARANTINED, f"step {step}: {error.message}") for e in members]
    )


def _fault(claimed: ClaimedEpisode, reason: FaultReason, message: str) -> Fault:
    return Fault(claimed.episode_id, claimed.attempt, reason, message)
