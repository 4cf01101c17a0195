"""What follows from the journal alone: which payloads have to be there, and when training began.

Folded from what was stored, so that it says the same before and after a crash.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from ledger_model.oracle import Oracle, require
from treadle_core.errors import PayloadMissingError
from treadle_experience.core.audit import reconcile
from treadle_experience.core.filters import Filter
from treadle_experience.core.groups import INCOMPLETE_GROUP
from treadle_experience.core.state import LEFT, Episode, Result, RunState, Task, TaskState
from treadle_experience.core.transitions import (
    CheckpointCommitted,
    EpisodeDone,
    EvaluationScored,
    HistoryForgotten,
    PayloadsReleased,
    TaskMoved,
    TaskOpened,
    Transition,
)
from treadle_payloads.media import reference_of
from treadle_payloads.store import PayloadReference, PayloadStore

PENDING = (TaskState.OPEN, TaskState.READY, TaskState.CLAIMED, TaskState.TRAINED)


@dataclass
class Journal:
    """Follows what was stored."""

    oracle: Oracle
    store: PayloadStore
    filter: Filter | None
    baselines: set[str]
    """Evaluation sets that have no score of step 0 yet."""
    stored: list[Transition]
    vanished: set[str] = field(default_factory=set)
    """sha256 of the payloads that the store has lost."""
    held: dict[str, Result] = field(default_factory=dict)
    """Results by episode, until their payloads are released."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a task left for good, where that has a reason."""
    gone: set[str] = field(default_factory=set)
    """Tasks that left for good."""
    released: int = 0
    """Step of the oldest checkpoint that can be restored."""
    _position: int = 0

    def check(self, state: RunState) -> None:
        """Compares with a state of which everything is stored."""
        for transition in self.stored[self._position :]:
            self._follow(transition)
        self._position = len(self.stored)
        self._check_filter(state)
        self._check_payloads(state)

    def check_account(self, state: RunState, condensed: Iterable[Transition]) -> None:
        """Every acknowledged result is in one place, and used once.

        By all that was stored, and by what is left of it: `condensed`.
        """
        whole, short = reconcile(self.stored, state), reconcile(list(condensed), state)
        for account in (whole, short):
            found = account.missing() | account.double_counted() | account.trained_twice()
            require(not found and not account.unaccounted(), "the account adds up (I1, I3)", found)
        counts = [{place: a.num_in(place) for place in a.places} for a in (whole, short)]
        require(counts[0] == counts[1], "a condensed journal tells the same", *counts)

    def is_gone(self, payload: Any, *, held: bool) -> bool:
        """Whether the store has no payload of a claimed episode.

        `held`: by the trainer that holds the run, whose batch must be there but for what was lost.
        """
        if payload.HasField("inline"):
            return False
        try:
            self.store.get(PayloadReference(payload.sha256, payload.size))
        except PayloadMissingError:
            lost = payload.sha256 in self.vanished
            require(lost or not held, "its payload is there", payload.sha256)
            return True
        return False

    def lose(self, random: Random) -> None:
        """The store loses a payload, or a medium."""
        stored = sorted({sha256 for each in self.held.values() for sha256, _ in each.stored()})
        if stored:
            sha256 = random.choice(stored)
            self.vanished.add(sha256)
            self.store.delete(sha256)

    def _follow(self, transition: Transition) -> None:
        if isinstance(transition, EpisodeDone):
            self.held[transition.episode_id] = transition.result
        elif isinstance(transition, PayloadsReleased):
            for id_ in transition.episode_ids:
                del self.held[id_]
        elif isinstance(transition, TaskMoved) and transition.state in LEFT:
            self.gone.add(transition.task_id)
            if transition.reason:
                self.reasons[transition.task_id] = transition.reason
        elif isinstance(transition, CheckpointCommitted):
            self.released = max(self.released, self.oracle.floor(transition.digest))
        elif isinstance(transition, HistoryForgotten):
            self._check_forgotten(transition)
        elif isinstance(transition, EvaluationScored) and transition.step == 0:
            self.baselines.discard(transition.name)
            steps = [
                self.oracle.announced[number]
                for number in (transition.oldest_version, transition.newest_version)
                if number
            ]
            require(not any(steps), "the baseline is that of step 0", transition)
        elif isinstance(transition, TaskOpened) and not transition.evaluation:
            require(not self.baselines, "training waits for the baseline", transition)

    def _check_forgotten(self, transition: HistoryForgotten) -> None:
        """Only what is trained below every restore is forgotten, and what left for good."""
        batches = self.oracle.batches.items()
        trained = {id_ for step, batch in batches if step <= self.released for id_, _ in batch}
        needed = set(transition.task_ids) - trained - self.gone
        require(not needed, "what may be needed is not forgotten", needed)
        require(transition.step <= self.released, "nor its batch", transition.step)

    def _check_filter(self, state: RunState) -> None:
        """What the filter drops is dropped for its reason, and all else is kept."""
        reasons = Counter(self.reasons.values())
        require(reasons == state.reasons, "what is left out is counted by its reason", reasons)
        found = {id_: task.reason for id_, task in state.tasks.items() if task.reason}
        require(found.items() <= self.reasons.items(), "and has its reason", found)
        if self.filter is None:
            return
        for task in state.tasks.values():
            # A group that was kept once is kept, though a member of it was made again.
            settled = task.state in (TaskState.READY, TaskState.FILTERED)
            if not settled or task.evaluation or task.task_id in self.oracle.loose:
                continue
            expected = self.filter([e.result for e in task.members() if e.result is not None])
            if task.reason != INCOMPLETE_GROUP:
                require(task.reason == expected, "the filter decides", task.task_id, expected)

    def _check_payloads(self, state: RunState) -> None:
        """A payload is there as long as a batch, or a restore, may need it, and no longer."""
        released = self.released
        require(state.released_step == released, "what no restore needs is released", released)
        for task in state.tasks.values():
            held = [each for each in task.episodes if each.episode_id in self.held]
            if task.state is TaskState.QUARANTINED:
                require(
                    len(held) == 1 and held[0].episode_id in self.oracle.unfit,
                    "the payload of who was found unfit is kept, and no other",
                    task.task_id,
                )
            else:
                done = [each for each in task.episodes if each.result is not None]
                needed = done if _is_needed(task, released) else []
                require(held == needed, "what may be needed is held", task.task_id, held, needed)
            for episode in held:
                self._check_bytes(task, episode)
        left = self.held.keys() - state.episodes.keys()
        require(not left, "payloads of what is forgotten are released", left)
        tasks = {id_: state.tasks[state.episodes[id_].task_id] for id_ in self.held}
        training = [r for id_, r in self.held.items() if tasks[id_].evaluation is None]
        media = {medium.sha256: medium.size for each in training for medium in each.media}
        size = sum(each.size for each in training) + sum(media.values())
        require(state.payload_bytes == size, "the budget counts what is held, media once", size)

    def _check_bytes(self, task: Task, episode: Episode) -> None:
        result = self.held[episode.episode_id]
        if not result.inlined:
            there = self.store.has(PayloadReference(result.sha256, result.size))
        else:
            there = episode.inline is not None or task.evaluation is not None
        lost = result.sha256 in self.vanished
        require(there or lost, "its payload is there", episode.episode_id, result.sha256)
        for medium in result.media:
            there = self.store.has(reference_of(medium)) or medium.sha256 in self.vanished
            require(there, "what it shows is there", episode.episode_id, medium.sha256)


def _is_needed(task: Task, released: int) -> bool:
    kept = task.state in PENDING or task.state is TaskState.SCORED
    return kept or (task.state is TaskState.CONSUMED and task.step > released)
