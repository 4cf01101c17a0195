"""Reconciliation: does every acknowledged result lie in exactly one place, and was it used once?

What was acknowledged, consumed, filtered, evicted and scored is read from the journal's
transitions one by one; only what is pending is read from the folded state. So the two accounts
come from different code, and a hole in either shows.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treadle_experience.core.state import LEFT, RunState, TaskState
from treadle_experience.core.transitions import (
    CheckpointCommitted,
    EpisodeDone,
    EpisodeLost,
    StepClaimed,
    StepReformed,
    StepUnclaimed,
    TaskMoved,
    TaskOpened,
    TrainerAcquired,
    Transition,
)

PENDING = (TaskState.OPEN, TaskState.READY, TaskState.CLAIMED, TaskState.TRAINED)


@dataclass(slots=True)
class Account:
    """Sets of episode ids, of acknowledged results only."""

    acknowledged: set[str] = field(default_factory=set[str])
    places: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """`consumed`, `filtered`, `evicted`, `quarantined`, `scored` and `pending`."""
    uses: Counter[str] = field(default_factory=Counter[str])
    """How many steps of the committed lineage each episode is in."""

    def missing(self) -> set[str]:
        """Acknowledged, and nowhere."""
        return self.acknowledged - set[str]().union(*self.places.values())

    def double_counted(self) -> set[str]:
        """In more than one place."""
        counts = Counter(id_ for place in self.places.values() for id_ in place)
        return {id_ for id_, count in counts.items() if count > 1}

    def trained_twice(self) -> set[str]:
        """In more than one step of the committed lineage."""
        return {id_ for id_, count in self.uses.items() if count > 1}


def reconcile(journal: Sequence[Transition], state: RunState) -> Account:
    """Takes stock of a journal and of the state that it folds into."""
    account = Account()
    members: dict[str, tuple[str, ...]] = {}
    moved: dict[str, TaskState] = {}
    for transition in journal:
        if isinstance(transition, TaskOpened):
            members[transition.task_id] = transition.episode_ids
        elif isinstance(transition, EpisodeDone):
            account.acknowledged.add(transition.episode_id)
        elif isinstance(transition, EpisodeLost):
            account.acknowledged.discard(transition.episode_id)
        elif isinstance(transition, TaskMoved):
            moved[transition.task_id] = transition.state
    steps = _committed_steps(journal)
    account.uses = Counter(
        id_ for tasks in steps.values() for task_id in tasks for id_ in members[task_id]
    )
    tasks_in = {place.value: [t for t, s in moved.items() if s is place] for place in LEFT}
    tasks_in["consumed"] = [task_id for tasks in steps.values() for task_id in tasks]
    tasks_in["pending"] = [id_ for id_, task in state.tasks.items() if task.state in PENDING]
    for place, task_ids in tasks_in.items():
        ids = {id_ for task_id in task_ids for id_ in members.get(task_id, ())}
        account.places[place] = ids & account.acknowledged
    return account


def _committed_steps(journal: Iterable[Transition]) -> dict[int, tuple[str, ...]]:
    """Members of each step that the head of the lineage covers, by walking its parents."""
    claims: dict[int, tuple[str, ...]] = {}
    checkpoints: dict[str, CheckpointCommitted] = {}
    head = ""
    for transition in journal:
        if isinstance(transition, StepClaimed):
            claims[transition.step] = transition.task_ids
        elif isinstance(transition, StepUnclaimed):
            del claims[transition.step]
        elif isinstance(transition, StepReformed):
            _reform(claims, transition)
        elif isinstance(transition, CheckpointCommitted):
            checkpoints[transition.digest] = transition
            head = transition.digest
        elif isinstance(transition, TrainerAcquired):
            head = transition.checkpoint_digest
    covered: dict[int, tuple[str, ...]] = {}
    while head:
        checkpoint = checkpoints[head]
        parent = checkpoints.get(checkpoint.parent_digest)
        first = parent.step + 1 if parent else 1
        covered |= {step: claims[step] for step in range(first, checkpoint.step + 1)}
        head = checkpoint.parent_digest
    return covered


def _reform(claims: dict[int, tuple[str, ...]], reformed: StepReformed) -> None:
    if reformed.task_ids:
        claims[reformed.step] = reformed.task_ids
        return
    for step in range(reformed.step, max(claims)):
        claims[step] = claims[step + 1]
    del claims[max(claims)]
