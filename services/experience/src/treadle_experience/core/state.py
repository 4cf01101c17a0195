"""What the ledger knows of a run: records, and the indices that keep decisions cheap.

Nothing here decides and nothing here is a clock: the state is the fold of the journal
(`apply.apply`), so two processes that read the same journal hold equal states.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from treadle_core.episodes import Termination
from treadle_core.media import Medium
from treadle_core.tickets import Json, Sampling
from treadle_core.versions import Version, VersionState


class TaskState(StrEnum):
    """Life of a task. `CONSUMED` is final in the lineage, those of `LEFT` are for good."""

    OPEN = "open"
    """A first ticket was issued; a member is missing. A recorded batch may wait for it."""
    READY = "ready"
    """Its members are done, as many as the run asks for, and the filter kept it."""
    CLAIMED = "claimed"
    """Member of a recorded batch."""
    TRAINED = "trained"
    """The trainer reported the batch's step; nothing durable yet."""
    CONSUMED = "consumed"
    """A committed checkpoint covers the step."""
    FILTERED = "filtered"
    EVICTED = "evicted"
    QUARANTINED = "quarantined"
    SCORED = "scored"
    """The task of an evaluation, with its result."""


LEFT = (TaskState.FILTERED, TaskState.EVICTED, TaskState.QUARANTINED, TaskState.SCORED)
"""States of a task that left for good."""


class EpisodeState(StrEnum):
    """Life of an episode."""

    WAITING = "waiting"
    """No attempt runs; the next one is to be issued."""
    ISSUED = "issued"
    """A replica holds the lease of the present attempt."""
    DONE = "done"
    FAILED = "failed"
    """Its retries are spent."""
    REVOKED = "revoked"
    """Its task ended without it."""


class Cause(StrEnum):
    """Why an attempt ended without a result."""

    FAILED = "failed"
    """The replica reported a failure."""
    EXPIRED = "expired"
    """Its lease or its deadline ran out."""
    RETURNED = "returned"
    """The replica drained."""
    RESTORED = "restored"
    """Its replica serves an older step than the attempt was leased for, and admission says no."""
    LOST = "lost"
    """Its result was recorded, and the payload cannot be had any more."""
    SPANNED = "spanned"
    """Its tokens are of more than the one version that its evaluation asks for."""


@dataclass(frozen=True, slots=True)
class Result:
    """The light part of a finished episode."""

    reward: float | None
    termination: Termination
    metrics: Mapping[str, float]
    turn_rewards: tuple[float, ...]
    num_tokens: int
    num_trained: int
    versions: tuple[int, ...]
    """Distinct policy and context versions of the sampled tokens, ascending."""
    traceparent: str
    sha256: str
    size: int
    inlined: bool
    """The ledger holds the payload's bytes; else they lie in the payload store."""
    node: str = ""
    """Address of the sidecar that has them; empty: the run's own store does."""
    node_epoch: int = 0
    """Life of that sidecar in which they came."""
    media: tuple[Medium, ...] = ()
    """What the segments show, each content once; the payload store holds the bytes."""

    def stored(self) -> tuple[tuple[str, str], ...]:
        """What the payload store holds of it: sha256 and node of its payload and of its media."""
        payload = () if self.inlined else ((self.sha256, self.node),)
        return (*payload, *((medium.sha256, medium.node) for medium in self.media))


@dataclass(slots=True)
class Episode:
    """One member of a task."""

    episode_id: str
    task_id: str
    index: int
    state: EpisodeState = EpisodeState.WAITING
    attempt: int = 0
    """Attempts issued so far."""
    replica_id: str = ""
    """Who got the last attempt."""
    version: int = 0
    """What that replica served then."""
    charged: int = 0
    """Attempts that count against the retries."""
    spanned: int = 0
    """Attempts whose tokens were not all of the version that their evaluation asks for."""
    ended: Cause | None = None
    """How the last attempt ended, where it ended without a result."""
    result: Result | None = None
    inline: bytes | None = None
    """The payload, until it is released."""
    released: bool = False
    """The payload and the media of its result are not kept any more."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Names one attempt at an episode."""

    episode_id: str
    attempt: int


@dataclass(slots=True)
class Task:
    """One task and its members, in the order of their index."""

    task_id: str
    order: int
    """Rank of its first ticket among all tasks of the run (or of its evaluation), from 1."""
    spec: Mapping[str, Json]
    """As its source made it; empty once no ticket of it can be issued again, a restore and a
    lost payload included."""
    episodes: list[Episode]
    evaluation: "EvaluationKey | None" = None
    state: TaskState = TaskState.OPEN
    reason: str = ""
    """Why it was filtered, evicted or quarantined."""
    step: int = 0
    """Step whose recorded batch it is in, or was in when it left for good; else 0. An open task of
    a batch lost a member's payload and has no place in the window."""

    def members(self) -> list[Episode]:
        """The episodes that are done, in the order of their index."""
        return [episode for episode in self.episodes if episode.state is EpisodeState.DONE]


@dataclass(frozen=True, slots=True, order=True)
class EvaluationKey:
    """An evaluation set is scored once at a step."""

    step: int
    name: str


@dataclass(slots=True)
class Evaluation:
    """One evaluation set at one step."""

    key: EvaluationKey
    version: int
    """Oldest version that may start its episodes."""
    sampling: Sampling
    size: int
    """Its tasks, one episode each."""
    exact: bool = False
    """Only tokens of that version's parameters count."""
    waiting: list[int] = field(default_factory=list[int])
    """Orders of the tasks to be issued, ascending."""
    pending: int = 0
    """Tasks without an outcome."""
    outcome: "Outcome | None" = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished evaluation says."""

    score: float | None
    """Mean reward of the episodes that have one; None when none has."""
    num_scored: int
    num_failed: int
    """Failed after their retries, or ended without a reward."""
    oldest_version: int
    newest_version: int


@dataclass(slots=True)
class Step:
    """A recorded batch."""

    step: int
    task_ids: tuple[str, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint."""

    digest: str
    parent_digest: str
    step: int
    path: str
    """Relative to the run's directory."""


@dataclass(slots=True)
class RunState:
    """All of it. Only `apply` writes here."""

    run_id: str = ""
    settings: Mapping[str, int] = field(default_factory=dict[str, int])
    """What the run began with and cannot change (`rules.FIXED`)."""
    position: int = 0
    """Transitions folded so far."""

    tasks: dict[str, Task] = field(default_factory=dict[str, Task])
    episodes: dict[str, Episode] = field(default_factory=dict[str, Episode])
    forgotten_tasks: Counter[TaskState] = field(default_factory=Counter[TaskState])
    """Tasks whose records are gone; all other counts go on counting them."""
    forgotten_results: Counter[TaskState] = field(default_factory=Counter[TaskState])
    """Their episodes that are done, by the state of the task."""
    task_counts: Counter[TaskState] = field(default_factory=Counter[TaskState])
    episode_counts: Counter[EpisodeState] = field(default_factory=Counter[EpisodeState])
    failures: Counter[str] = field(default_factory=Counter[str])
    """Failed and expired attempts by failure class."""
    reasons: Counter[str] = field(default_factory=Counter[str])
    """Tasks that were filtered, evicted or quarantined, by reason."""
    lost_payloads: int = 0
    """Recorded results whose payload was lost."""
    payload_bytes: int = 0
    """Size of the payloads of training episodes that are not released, and once of each medium."""
    shown: dict[str, int] = field(default_factory=dict[str, int])
    """Training episodes, not released, that show a medium, by its sha256."""
    running: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])
    """Issued episodes by replica, oldest lease first."""

    cursor: int = 0
    """Tasks read from the training source."""
    exhausted: bool = False
    """The training source has no task at the cursor."""
    num_opened: int = 0
    """Training tasks opened; the order of the newest."""
    window: list[int] = field(default_factory=list[int])
    """Orders of the open and ready training tasks that no batch holds, ascending."""
    kept: set[int] = field(default_factory=set[int])
    """Those of them whose batch was given up: the next batch that is formed takes them first."""
    waiting: list[int] = field(default_factory=list[int])
    """Orders of the open training tasks that have a waiting member, ascending."""

    steps: dict[int, Step] = field(default_factory=dict[int, Step])
    forgotten_step: int = 0
    """Batches of steps up to this one are forgotten."""
    claimed_through: list[int] = field(default_factory=lambda: [0])
    """Places in the batches of all steps up to one, for each from `forgotten_step` on; a place
    that nobody took counts too."""
    trained_step: int = 0
    """Last step reported trained in the lineage."""
    last_step: int | None = None
    """The run's last step, once it is known."""
    closed: bool = False
    """The last step was trained once; nothing is opened or claimed anew."""

    aim: float = 0.0
    """Lag that an adaptive window aims at, in steps; a fraction is of a step's tasks."""
    starved_step: int = 0
    """Newest step whose claim found an adaptive window too narrow."""

    trainer_epoch: int = 0
    acquisitions: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    """Epoch by holder and checkpoint digest."""
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict[str, Checkpoint])
    lineage: list[str] = field(default_factory=list[str])
    """Digests from the first checkpoint to the head."""
    released_step: int = 0
    """Payloads of steps up to this one are gone; no older checkpoint can be restored."""

    num_versions: int = 0
    """Versions announced; the number of the newest."""
    forgotten_version: int = 0
    """Versions up to this number are forgotten."""
    versions: dict[int, Version] = field(default_factory=dict[int, Version])
    version_requests: dict[str, int] = field(default_factory=dict[str, int])
    newest_version: int = 0
    """Newest committed version; 0 when none."""
    evaluations: dict[EvaluationKey, Evaluation] = field(
        default_factory=dict[EvaluationKey, Evaluation]
    )
    unfinished: list[EvaluationKey] = field(default_factory=list[EvaluationKey])
    """Evaluations without an outcome, in the order of their opening."""
    finished: list[EvaluationKey] = field(default_factory=list[EvaluationKey])
    """Evaluations with one, in the order of their end."""
    references: dict[str, int] = field(default_factory=dict[str, int])
    """Results that need the bytes under a sha256 in the payload store: a payload or a medium."""

    def task_of(self, order: int) -> Task:
        """The training task with this order."""
        return self.tasks[training_task_id(order)]

    def head(self) -> Checkpoint | None:
        """The newest checkpoint of the lineage."""
        return self.checkpoints[self.lineage[-1]] if self.lineage else None

    def covered_step(self) -> int:
        """Step of the head; 0 where there is none."""
        head = self.head()
        return head.step if head else 0

    def restorable(self) -> list[Checkpoint]:
        """Checkpoints that a trainer may restore, newest first: at most two."""
        newest = [self.checkpoints[digest] for digest in reversed(self.lineage[-RETAINED:])]
        return [checkpoint for checkpoint in newest if checkpoint.step >= self.released_step]

    def last_claimed(self) -> int:
        """Newest step with a recorded batch."""
        return self.forgotten_step + len(self.claimed_through) - 1

    def version(self, number: int) -> Version | None:
        """The version with this number; None where there is none.

        One that is forgotten passes for as old as can be: it is too old for all that is to come.
        """
        if 0 < number <= self.forgotten_version:
            return Version(number, 0, 0, 0, VersionState.COMMITTED)
        return self.versions.get(number)


RETAINED = 2
"""Checkpoints of the lineage that stay restorable."""


def training_task_id(order: int) -> str:
    """The id of the training task opened as number `order`, from 1."""
    return f"t{order:06d}"


def evaluation_task_id(key: EvaluationKey, order: int) -> str:
    """The id of task `order`, from 1, of an evaluation."""
    return f"e-{key.name}-{key.step:06d}-{order:06d}"
