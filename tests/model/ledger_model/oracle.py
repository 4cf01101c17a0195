"""What clients know of a run, and what must follow from it. Nothing here is code under test.

The oracle hears every request before it is sent and every answer as it arrives. A request without
an answer is in doubt: it may have happened or not. Steps of versions, digests of results, members
of batches and the lineage are its own notes.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_experience.core.state import EpisodeState, RunState, TaskState

IN_BATCHES = (TaskState.CLAIMED, TaskState.TRAINED, TaskState.CONSUMED)
Batch: TypeAlias = list[tuple[str, list[tuple[str, int, str]]]]
"""Tasks, each with its episodes, their attempts and digests."""

OUT = (TaskState.FILTERED, TaskState.EVICTED, TaskState.QUARANTINED)


class BreachError(AssertionError):
    """A promise is broken: a counter-example."""


def require(holds: object, promise: str, *details: object) -> None:
    """Raises BreachError unless `holds`."""
    if not holds:
        raise BreachError(f"{promise}: {' '.join(map(str, details))}")


@dataclass(frozen=True)
class Bounds:
    """What the recipe promises."""

    max_lag: int
    tasks_per_step: int
    group_size: int
    smallest_group: int
    drops_last: bool
    """A last batch that cannot be filled is evicted."""
    payload_budget_bytes: int | None
    in_order: bool
    """Batches take tasks strictly in the order of their opening."""


@dataclass(frozen=True)
class Sent:
    """A result that a replica sent."""

    digest: str
    versions: frozenset[int]
    data: bytes
    reward: float | None
    is_stored: bool
    """Its payload lies in the store, not in the ledger."""
    images: tuple[bytes, ...]
    """What its segment shows, each once."""


@dataclass
class Oracle:
    """Notes on one run."""

    bounds: Bounds
    forgotten: set[str]
    """Tasks that the run said it forgot: `Journal` looks whether it could."""
    tickets: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Every ticket that arrived, by episode and attempt."""
    sent: dict[tuple[str, int], dict[str, Sent]] = field(default_factory=dict)
    acknowledged: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Attempt and digest by episode."""
    failed: set[tuple[str, int]] = field(default_factory=set)
    announced: dict[int, int] = field(default_factory=dict)
    """Step by version."""
    commits: set[int] = field(default_factory=set)
    """Versions whose commit was sent."""
    epoch: int = 0
    batches: dict[int, Batch] = field(default_factory=dict)
    """Tasks, and their episodes with attempt and digest, by step."""
    checkpoints: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Parent and step of every checkpoint whose commit was sent."""
    committed: set[str] = field(default_factory=set)
    """Those of them that were acknowledged."""
    lost: set[tuple[str, int]] = field(default_factory=set)
    """Attempts whose payload a trainer said was lost."""
    unfit: set[str] = field(default_factory=set)
    """Episodes that a trainer said were unfit."""
    loose: set[str] = field(default_factory=set)
    """Tasks that may have left their batch: a trainer found fault with a member."""
    shaken: set[int] = field(default_factory=set)
    """Steps handed back, whose mended batch nobody has seen yet."""
    mended: set[int] = field(default_factory=set)
    """Steps whose batch lost members, and may be short."""
    trained: int = 0
    """Last step whose report was acknowledged to the trainer of `epoch`."""
    published: dict[int, int] = field(default_factory=dict)
    """Step by version whose commit was acknowledged."""
    claims: int = 0

    def leased(self, ticket: Any) -> None:
        key = (ticket.episode_id, ticket.attempt)
        require(key not in self.tickets, "an attempt is issued once", key)
        done = self.acknowledged.get(ticket.episode_id)
        if done is not None:
            lost = (ticket.episode_id, done[0]) in self.lost
            require(lost, "a finished episode is not issued again", key, done)
            del self.acknowledged[ticket.episode_id]
        require(0 <= ticket.index < self.bounds.group_size, "a member has its place", key)
        self.tickets[key] = ticket

    def sends(self, key: tuple[str, int], sent: Sent) -> None:
        self.sent.setdefault(key, {})[sent.digest] = sent

    def completed(
        self, key: tuple[str, int], sent: Sent, *, duplicate: bool, was: tuple[int, str] | None
    ) -> None:
        """A result was accepted; `was` is what was acknowledged before it was sent."""
        now = self.acknowledged.get(key[0])
        require(
            now in (None, (key[1], sent.digest)),
            "an episode has one result (I4)",
            key,
            now,
            sent.digest,
        )
        require(duplicate or was is None, "a result sent again is a duplicate (I4)", key)
        require(key not in self.failed, "an attempt that failed has no result", key)
        for number in sent.versions:
            require(number in self.commits, "tokens are of registered versions (I6)", number)
        self.acknowledged[key[0]] = (key[1], sent.digest)

    def refused(self, key: tuple[str, int], sent: Sent, reason: str) -> None:
        before = self.acknowledged.get(key[0])
        if key in self.lost or (reason == "UNKNOWN_EPISODE" and self.is_forgotten(key)):
            return
        if before == (key[1], sent.digest):
            raise BreachError(f"an acknowledged result is acknowledged again (I4): {key} {reason}")
        if before is not None and before[0] == key[1]:
            require(reason == "RESULT_CONFLICT", "another result conflicts (I4)", key, reason)

    def is_forgotten(self, key: tuple[str, int]) -> bool:
        """Whether the task of an attempt is."""
        return self.tickets[key].task_id in self.forgotten

    def acquired(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.trained = epoch, 0

    def reported(self, epoch: int, step: int, *, asked: bool) -> None:
        """A step was reported; `asked`: a checkpoint is wanted now."""
        budget = self.bounds.payload_budget_bytes
        if budget in (None, 1):
            require(asked is (budget == 1), "a short budget asks for a checkpoint", step, budget)
        if epoch == self.epoch:
            self.trained = max(self.trained, step)

    def accepted_from(self, epoch: int, newest_before: int, method: str) -> None:
        """A trainer's call of that epoch was accepted; `newest_before` it was sent."""
        require(
            epoch >= newest_before, "only one trainer is active (I22)", method, epoch, newest_before
        )

    def claimed(self, step: int, answer: Any, state: RunState) -> None:
        """A batch arrived; `state` is that of now."""
        self.claims += 1
        batch: Batch = []
        for task in answer.tasks:
            self._check_group(task)
            members = [(e.episode_id, e.attempt, e.result.payload.sha256) for e in task.episodes]
            for episode in task.episodes:
                self._check_member(step, episode)
            batch.append((task.task_id, members))
        self._compare(step, batch, state)
        full = len(batch) == self.bounds.tasks_per_step
        short = answer.last or step in self.mended
        require(full or short, "only the last batch is short", step, len(batch))
        self._check_disjoint()

    def handed_back(self, step: int, faults: Any) -> None:
        """A trainer is about to hand a batch back; `faults` come with the task of each."""
        if faults:
            # A later batch that was given up and not formed again may fill the places of this one.
            for later in [each for each in self.shaken if each > step]:
                self.batches.pop(later, None)
                self.mended.add(later)
        for task_id, fault in faults:
            self.shaken.add(step)
            self.loose.add(task_id)
            if fault.reason == pb.FAULT_REASON_PAYLOAD_LOST:
                self.lost.add((fault.episode_id, fault.attempt))
            else:
                self.unfit.add(fault.episode_id)

    def _compare(self, step: int, batch: Batch, state: RunState) -> None:
        """A step keeps its batch, but for members that a trainer found fault with."""
        present = {task_id for task_id, _ in batch}
        while (recorded := self.batches.get(step)) is not None:
            left = {task_id for task_id, _ in recorded} - present
            gone = all(state.tasks[id_].state in OUT for id_ in left)
            kept = gone and left <= self.loose
            require(kept, "a step keeps its batch (I9)", step, recorded, batch)
            if len(left) < len(recorded):
                break
            # All of its members left: it is no step, and the later ones move up.
            later = sorted(each for each in self.batches if each > step)
            self.batches = {s: b for s, b in self.batches.items() if s < step} | {
                s - 1: self.batches[s] for s in later
            }
            self.mended |= {s - 1 for s in later if s in self.mended} | {step}
        for task_id, members in recorded or ():
            now = dict(batch).get(task_id, members)
            kept = now == members or task_id in self.loose
            require(kept, "a step keeps its batch (I9)", step, members, now)
        if recorded is not None and [t for t, _ in recorded] != [t for t, _ in batch]:
            self.mended.add(step)
        self.batches[step] = batch
        self.shaken.discard(step)

    def _check_group(self, task: Any) -> None:
        indices = [episode.index for episode in task.episodes]
        require(
            len(set(indices)) == len(indices)
            and self.bounds.smallest_group <= len(indices) <= self.bounds.group_size
            and all(episode.HasField("result") for episode in task.episodes),
            "a group is trained whole (I5)",
            task.task_id,
            indices,
        )

    def _check_member(self, step: int, episode: Any) -> None:
        key = (episode.episode_id, episode.attempt)
        digest = episode.result.payload.sha256
        sent = self.sent.get(key, {}).get(digest)
        if sent is None:
            raise BreachError(f"what is trained was sent (I24): {key} {digest}")
        payload, result = episode.result.payload, episode.result
        there = payload.inline == (b"" if sent.is_stored else sent.data)
        require(there, "its payload is where it was sent", key)
        shown = tuple(medium.sha256 for medium in result.media)
        wanted = tuple(hashlib.sha256(image).hexdigest() for image in sent.images)
        require(shown == wanted, "its media are what was sent", key, shown)
        reward = result.reward if result.HasField("reward") else None
        require(reward == sent.reward, "its reward is what was sent", key, reward)
        acknowledged = self.acknowledged.get(key[0])
        require(
            acknowledged in (None, (key[1], digest)),
            "what is trained is what was acknowledged (I4)",
            key,
            acknowledged,
        )
        for number in sent.versions:
            require(number in self.commits, "tokens are of registered versions (I6)", key, number)
            lag = step - 1 - self.announced[number]
            require(lag <= self.bounds.max_lag, "the lag bound (I7)", key, f"lags {lag}")

    def _check_disjoint(self) -> None:
        uses = Counter(
            e[0] for batch in self.batches.values() for _, members in batch for e in members
        )
        twice = [id_ for id_, count in uses.items() if count > 1]
        require(not twice, "an episode is in one step (I3)", twice)
        if self.bounds.in_order:
            steps = sorted(self.batches)
            order = [task_id for step in steps for task_id, _ in self.batches[step]]
            require(order == sorted(order), "the oldest tasks come first", order)

    def check_state(self, state: RunState) -> None:
        """Compares what was acknowledged with a state of which everything is stored."""
        for id_, (attempt, digest) in self.acknowledged.items():
            episode = state.episodes.get(id_)
            if (id_, attempt) in self.lost or self.is_forgotten((id_, attempt)):
                continue
            require(
                episode is not None
                and episode.result is not None
                and (episode.attempt, episode.result.sha256) == (attempt, digest)
                and episode.state is EpisodeState.DONE,
                "what was acknowledged is there (I1)",
                id_,
                attempt,
                episode,
            )
        for (id_, attempt), ticket in self.tickets.items():
            if ticket.task_id in self.forgotten:
                continue
            episode = state.episodes.get(id_)
            require(
                episode is not None
                and episode.task_id == ticket.task_id
                and episode.attempt >= attempt,
                "a ticket that was given out is there",
                id_,
                attempt,
                episode,
            )
        require(state.trainer_epoch >= self.epoch, "an epoch is kept (I22)", state.trainer_epoch)
        if state.trainer_epoch == self.epoch:
            require(state.trained_step >= self.trained, "a reported step is there", self.trained)
        self._check_versions(state)
        for digest in self.committed:
            old = self.checkpoints[digest][1] < state.forgotten_step
            require(digest in state.checkpoints or old, "a committed checkpoint is there", digest)
        self._check_places(state)

    def _check_versions(self, state: RunState) -> None:
        for number, step in self.published.items():
            version = state.versions.get(number)
            if number <= state.forgotten_version:
                old = number < state.newest_version and step < state.forgotten_step
                require(old, "only an old version is forgotten", number, step)
                continue
            require(
                version is not None and version.step == step and version.state == "committed",
                "a committed version is there",
                number,
                version,
            )

    def _check_places(self, state: RunState) -> None:
        counts = Counter(task.state for task in state.tasks.values()) + state.forgotten_tasks
        require(counts == +state.task_counts, "the counts are those of the tasks", counts)
        covered = self._covered(state)
        for step, batch in self.batches.items():
            if self.shaken and step >= min(self.shaken):
                self._check_loosely(state, batch)
                continue
            if step <= covered:
                expected = TaskState.CONSUMED
            elif step <= state.trained_step:
                expected = TaskState.TRAINED
            else:
                expected = TaskState.CLAIMED
            for task_id, members in self._known(batch):
                found = state.tasks[task_id].state
                require(
                    found is expected, "a batch's task is where its step is (I1)", task_id, found
                )
                for id_, _, _ in members:
                    require(state.episodes[id_].result is not None, "and its results", id_)
        fixed = [s for s in self.batches if not self.shaken or s < min(self.shaken)]
        known = {task_id for s in fixed for task_id, _ in self.batches[s]} - self.loose
        for task in state.tasks.values():
            if task.state in OUT:
                require(task.reason, "what is left out has a reason", task.task_id)
                require(task.task_id not in known, "a batch loses no task (I1)", task.task_id)

    def _check_loosely(self, state: RunState, batch: Batch) -> None:
        """The batch may be mended by now, and nobody has seen it."""
        for task_id, _ in self._known(batch):
            found = state.tasks[task_id].state
            dropped = found is TaskState.EVICTED and self.bounds.drops_last and state.closed
            here = found in (*IN_BATCHES, TaskState.OPEN, TaskState.READY) or dropped
            require(here or task_id in self.loose, "a batch loses no task (I1)", task_id, found)

    def _known(self, batch: Batch) -> Batch:
        return [each for each in batch if each[0] not in self.forgotten]

    def floor(self, digest: str) -> int:
        """Step of the oldest checkpoint that can be restored while this one is the head."""
        parent, step = self.checkpoints[digest]
        return self.checkpoints[parent][1] if parent else step

    def _covered(self, state: RunState) -> int:
        """Step of the head of the lineage, after a walk along the notes."""
        head = state.head()
        if head is None:
            require(not self.committed, "a committed checkpoint is there", self.committed)
            return 0
        digest, step = head.digest, head.step
        while digest:
            require(digest in self.checkpoints, "a checkpoint was sent", digest)
            parent, covered = self.checkpoints[digest]
            require(covered <= step, "a parent is older", digest)
            digest, step = parent, covered
        return head.step
