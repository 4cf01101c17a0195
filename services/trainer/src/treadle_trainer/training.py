"""From a claimed batch to a step: reads and checks its episodes, trains, finds who spoils it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

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
from treadle_trainer.core.ranks import ALONE, Ranks
from treadle_trainer.core.shares import share_out, unread
from treadle_trainer.core.step import (
    NonFiniteStepError,
    StepResult,
    is_finite,
    silent,
    train_step,
)
from treadle_trainer.ports import Backend, PayloadReader, Read
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
    claim: Claim,
    *,
    step: int,
    recipe: Recipe,
    backend: Backend,
    payloads: PayloadReader,
    ranks: Ranks = ALONE,
) -> StepResult:
    """Trains the step of a claim, of which each rank reads and computes its share.

    Raises BatchFaultyError where episodes are in the way, and StepFailedError where every task by
    itself makes loss or gradient no number, since then no batch would do.
    """
    groups = read_groups(claim, recipe=recipe, backend=backend, payloads=payloads, ranks=ranks)
    return train_groups(claim, groups, step=step, recipe=recipe, backend=backend, ranks=ranks)


def train_groups(
    claim: Claim,
    groups: Sequence[Group],
    *,
    step: int,
    recipe: Recipe,
    backend: Backend,
    ranks: Ranks = ALONE,
) -> StepResult:
    """Trains the step of a claim whose groups are read. Raises as `train`."""
    try:
        return train_step(
            backend,
            groups,
            advantage=recipe.advantage,
            loss=recipe.loss,
            settings=recipe.settings,
            learning_rate=recipe.schedule(step),
            ranks=ranks,
        )
    except NonFiniteStepError as error:
        cause = _Cause(step, recipe, backend, ranks)
        raise cause(claim, groups, error) from error


def read_groups(
    claim: Claim,
    *,
    recipe: Recipe,
    backend: Backend,
    payloads: PayloadReader,
    ranks: Ranks = ALONE,
) -> list[Group]:
    """Reads and checks every episode of a claim; raises BatchFaultyError naming all bad ones.

    An episode of another rank has no segments here. All ranks find the same faults.
    """
    turns = share_out(claim, recipe.advantage, ranks.size)
    mine = [e for e, turn in zip(claim.episodes, turns, strict=True) if turn == ranks.rank]
    check = partial(_checked, recipe=recipe, backend=backend)
    checked = {e.episode_id: check(e, r) for e, r in zip(mine, payloads.read(mine), strict=True)}
    faults = [each for each in checked.values() if isinstance(each, Fault)]
    if faults := _agreed(faults, ranks):
        raise BatchFaultyError(faults)
    fit = {id_: each for id_, each in checked.items() if isinstance(each, Episode)}
    return [
        Group(task.task_id, tuple(fit.get(e.episode_id) or unread(e) for e in task.episodes))
        for task in claim.tasks
    ]


def _agreed(faults: Sequence[Fault], ranks: Ranks) -> list[Fault]:
    """The faults that all ranks found. This is where they meet before a step."""
    rows = [(f.episode_id, f.attempt, f.reason.value, f.message) for f in faults]
    said = ranks.gather(json.dumps(rows).encode() if rows else b"")
    return [
        Fault(episode_id, attempt, FaultReason(reason), message)
        for episode_id, attempt, reason, message in chain.from_iterable(
            json.loads(each) for each in said if each
        )
    ]


def _checked(
    claimed: ClaimedEpisode, read: Read, *, recipe: Recipe, backend: Backend
) -> Episode | Fault:
    if isinstance(read, PayloadMissingError | PayloadCorruptError):
        return _fault(claimed, FaultReason.PAYLOAD_LOST, read.message)
    if isinstance(read, InvalidFieldError):
        return _fault(claimed, FaultReason.QUARANTINED, read.message)
    try:
        episode = checked_episode(
            claimed,
            read,
            vocab_size=backend.vocab_size,
            max_tokens=recipe.settings.microbatch_tokens,
        )
        for segment in episode.segments:
            Example.of(segment, 0.0)  # what cannot be shifted is found here, not in the step
    except InvalidFieldError as error:
        return _fault(claimed, FaultReason.QUARANTINED, error.message)
    return episode


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why a step is no number: tasks that are none by themselves, or else all of it."""

    step: int
    recipe: Recipe
    backend: Backend
    ranks: Ranks

    def __call__(
        self, claim: Claim, groups: Sequence[Group], error: NonFiniteStepError
    ) -> TreadleError:
        """The error to raise; every rank comes to the same."""
        recipe = self.recipe
        says_nothing = silent(
            groups, advantage=recipe.advantage, settings=recipe.settings, ranks=self.ranks
        )
        pairs = zip(claim.tasks, groups, says_nothing, strict=True)
        trained = [(task, group) for task, group, nothing in pairs if not nothing]
        found = culprits(trained, is_bad=self._is_bad, max_probes=MOST_PROBES)
        members = [episode for task, _ in found for episode in task.episodes]
        said = f"step {self.step}: {error.message}"
        if len(found) == len(trained) > 1:
            names = ", ".join(f"{e.episode_id}/{e.attempt}" for e in members)
            return StepFailedError(
                f"{said} with each part of the batch; episodes {names}",
                field=error.field,
                limit=error.limit,
                value=error.value,
            )
        return BatchFaultyError([_fault(e, FaultReason.QUARANTINED, said) for e in members])

    def _is_bad(self, part: Sequence[tuple[ClaimedTask, Group]]) -> bool:
        return not is_finite(
            self.backend,
            [group for _, group in part],
            advantage=self.recipe.advantage,
            loss=self.recipe.loss,
            settings=self.recipe.settings,
            ranks=self.ranks,
        )


def _fault(claimed: ClaimedEpisode, reason: FaultReason, message: str) -> Fault:
    return Fault(claimed.episode_id, claimed.attempt, reason, message)
