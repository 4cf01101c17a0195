"""Reconciliation: does every acknowledged result lie in exactly one place, and was it used once?

What was acknowledged, consumed, filtered, evicted and scored is read from the journal's
transitions one by one; only what is pending is read from the folded state. So the two accounts
come from different code, and a hole in either shows. What a condensed journal has no record of is
known by number only: as many results were acknowledged as lie in final places.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from treadle_experience.core.condensation import restore, restore_episode, restore_task
from treadle_experience.core.state import LEFT, Checkpoint, EpisodeState, RunState, TaskState
from treadle_experience.core.transitions import (
    CheckpointCommitted,
    EpisodeDone,
    EpisodeKept,
    EpisodeLost,
    StateCondensed,
    StepClaimed,
    StepReformed,
    StepUnclaimed,
    TaskKept,
    TaskMoved,
    TaskOpened,
    TrainerAcquired,
    Transition,
)

PENDING = (TaskState.OPEN, TaskState.READY, TaskState.CLAIMED, TaskState.TRAINED)


@dataclass(slots=True)
class Account:
    """Sets of episode ids, of acknowledged results only; numbers of those without a record."""

    acknowledged: set[str] = field(default_factory=set[str])
    places: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """`consumed`, `filtered`, `evicted`, `quarantined`, `scored` and `pending`."""
    uses: Counter[str] = field(default_factory=Counter[str])
    """How many steps of the committed lineage each episode is in."""
    unnamed: int = 0
    """Acknowledged results without a record."""
    forgotten: Counter[str] = field(default_factory=Counter[str])
    """Results without a record by place."""

    def num_acknowledged(self) -> int:
        """All of them."""
        return len(self.acknowledged) + self.unnamed

    def num_in(self, place: str) -> int:
        """Results in a place, with those that have no record."""
        return len(self.places[place]) + self.forgotten[place]

    def unaccounted(self) -> int:
        """Acknowledged results, less those in a place."""
        return self.num_acknowledged() - sum(map(self.num_in, self.places))

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
    base = _base_of(journal)
    account = Account({id_ for id_, episode in base.episodes.items() if episode.result})
    members = {id_: tuple(e.episode_id for e in t.episodes) for id_, t in base.tasks.items()}
    moved = {id_: task.state for id_, task in base.tasks.items()}
    for transition in journal:
        if isinstance(transition, TaskOpened):
            members[transition.task_id] = transition.episode_ids
        elif isinstance(transition, EpisodeDone):
            account.acknowledged.add(transition.episode_id)
        elif isinstance(transition, EpisodeLost):
            account.acknowledged.discard(transition.episode_id)
        elif isinstance(transition, TaskMoved):
            moved[transition.task_id] = transition.state
    _count_forgotten(account, base)
    claimed = [id_ for ids in _committed_steps(journal, base).values() for id_ in ids]
    # A task may be kept longer than its batch; nothing takes back what it is.
    claimed += [
        task.task_id
        for task in base.tasks.values()
        if task.state is TaskState.CONSUMED and task.step <= base.forgotten_step
    ]
    account.uses = Counter(id_ for task_id in claimed for id_ in members[task_id])
    tasks_in = {place.value: [t for t, s in moved.items() if s is place] for place in LEFT}
    tasks_in["consumed"] = claimed
    tasks_in["pending"] = [id_ for id_, task in state.tasks.items() if task.state in PENDING]
    for place, task_ids in tasks_in.items():
        ids = {id_ for task_id in task_ids for id_ in members.get(task_id, ())}
        account.places[place] = ids & account.acknowledged
    return account


def _base_of(journal: Iterable[Transition]) -> RunState:
    """The state that a condensed journal begins with; an empty one where it is not condensed."""
    base = RunState()
    for transition in journal:
        if isinstance(transition, StateCondensed):
            restore(transition, base)
        elif isinstance(transition, TaskKept):
            restore_task(transition, base)
        elif isinstance(transition, EpisodeKept):
            restore_episode(transition, base)
        else:
            break
    return base


def _count_forgotten(account: Account, base: RunState) -> None:
    """By the counts of episodes and by those of places, which are kept apart."""
    known = sum(episode.state is EpisodeState.DONE for episode in base.episodes.values())
    account.unnamed = base.episode_counts[EpisodeState.DONE] - known
    account.forgotten.update({name.value: n for name, n in base.forgotten_results.items()})


def _committed_steps(journal: Iterable[Transition], base: RunState) -> dict[int, tuple[str, ...]]:
    """Members of each step that the head of the lineage covers, by walking its parents.

    `base` is what a condensed journal begins with.
    """
    claims = {number: step.task_ids for number, step in base.steps.items()}
    checkpoints: dict[str, CheckpointCommitted | Checkpoint] = {**base.checkpoints}
    head = base.lineage[-1] if base.lineage else ""
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
    while (checkpoint := checkpoints.get(head)) is not None:
        parent = checkpoints.get(checkpoint.parent_digest)
        first = max(base.forgotten_step, parent.step if parent else 0) + 1
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
