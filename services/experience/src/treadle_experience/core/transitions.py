"""Everything that can happen to a run. The journal is a sequence of these.

A transition is JSON: `to_body` and `from_body` are exact inverses. Payload bytes travel apart (the
field `inline` of `INLINED` kinds), so that a ledger can forget them (`PayloadsReleased`).
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, cast

from treadle_core.episodes import Termination
from treadle_core.media import Medium
from treadle_core.tickets import Json
from treadle_experience.core.errors import LedgerFormatError
from treadle_experience.core.kept import EpisodeKept, StateCondensed, TaskKept
from treadle_experience.core.state import Cause, EpisodeState, Result, TaskState


@dataclasses.dataclass(frozen=True, slots=True)
class RunBegan:
    """The first transition of every journal."""

    run_id: str
    settings: Mapping[str, int]
    """`rules.FIXED` and their values."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskOpened:
    """A task was read from its source, and its first ticket is about to be issued."""

    task_id: str
    order: int
    cursor: int
    """Tasks read from the source so far, this one included."""
    spec: Mapping[str, Json]
    episode_ids: tuple[str, ...]
    evaluation: str = ""
    """Name of the evaluation; empty for training."""
    step: int = 0
    """Step of the evaluation."""


@dataclasses.dataclass(frozen=True, slots=True)
class SourceExhausted:
    """The training source has no task at the cursor."""

    cursor: int


@dataclasses.dataclass(frozen=True, slots=True)
class TicketIssued:
    """A replica got the next attempt of an episode."""

    episode_id: str
    attempt: int
    replica_id: str
    version: int
    """What the replica serves."""


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeDone:
    """An attempt delivered its result."""

    episode_id: str
    attempt: int
    result: Result
    inline: bytes | None
    """The payload; None when it lies in the payload store, or is released."""


@dataclasses.dataclass(frozen=True, slots=True)
class AttemptEnded:
    """An attempt ended without a result."""

    episode_id: str
    attempt: int
    cause: Cause
    charged: bool
    """It counts against the retries."""
    final: bool
    """The retries are spent."""
    failure_class: str = ""
    message: str = ""
    traceparent: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskMoved:
    """A task became ready or scored, is whole again in its batch, or left for good."""

    task_id: str
    state: TaskState
    reason: str = ""
    """Why it was filtered, evicted or quarantined: one word, for counts."""
    message: str = ""
    """The same for people."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepClaimed:
    """A batch was formed."""

    step: int
    task_ids: tuple[str, ...]
    last: bool
    """It is the run's last."""


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerStarved:
    """A claim came while an adaptive window held fewer tasks than the step takes."""

    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeLost:
    """The payload of a claimed episode cannot be had; it is to be issued again."""

    episode_id: str
    attempt: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class StepUnclaimed:
    """The newest batch is no more; what is left of it stands in the window, to be claimed anew."""

    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepReformed:
    """A recorded batch lost members for good, and nothing took their place."""

    step: int
    task_ids: tuple[str, ...]
    """What is left, in order. Where nothing is, the batches of later steps move down by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepTrained:
    """The trainer reported a step."""

    step: int
    trainer_epoch: int
    metrics: Mapping[str, float]
    trace_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class RunClosed:
    """No task is opened and no batch is formed any more."""

    last_step: int


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerAcquired:
    """A trainer became the only one; steps beyond its checkpoint are to be trained again."""

    trainer_epoch: int
    holder: str
    checkpoint_digest: str
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    """The commit point of training up to `step`."""

    digest: str
    parent_digest: str
    step: int
    path: str
    trainer_epoch: int


@dataclasses.dataclass(frozen=True, slots=True)
class PayloadsReleased:
    """No restore can need the payloads and media of these episodes again."""

    episode_ids: tuple[str, ...]
    stored: tuple[str, ...]
    """sha256 of those that lie in the payload store, for each episode that needed them."""
    held: tuple[tuple[str, str], ...] = ()
    """For each of these its sidecar's address, or nothing, and its episode."""


@dataclasses.dataclass(frozen=True, slots=True)
class VersionAnnounced:
    """A publication number was given out."""

    version: int
    step: int
    trainer_epoch: int
    request_id: str
    trace_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class VersionCommitted:
    """Engines may serve the version from here on."""

    version: int
    weights_digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class VersionAborted:
    """The version will never be served."""

    version: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationOpened:
    """A set is to be scored; its tasks are opened in the same append."""

    name: str
    step: int
    version: int
    temperature: float
    max_tokens: int
    size: int
    exact: bool = False
    """Only tokens of the version's parameters count."""


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationScored:
    """All tasks of an evaluation have an outcome."""

    name: str
    step: int
    score: float | None
    num_scored: int
    num_failed: int
    oldest_version: int
    newest_version: int


@dataclasses.dataclass(frozen=True, slots=True)
class HistoryForgotten:
    """Nothing that can still happen needs these records; what they count for is kept."""

    task_ids: tuple[str, ...]
    step: int
    """Batches of steps up to this one, and checkpoints of earlier ones."""
    version: int
    """Versions up to this number."""
    evaluations: tuple[tuple[int, str], ...]
    """Finished evaluations: step and name."""


Transition: TypeAlias = (
    RunBegan
    | TaskOpened
    | SourceExhausted
    | TicketIssued
    | EpisodeDone
    | AttemptEnded
    | TaskMoved
    | StepClaimed
    | TrainerStarved
    | EpisodeLost
    | StepUnclaimed
    | StepReformed
    | StepTrained
    | RunClosed
    | TrainerAcquired
    | CheckpointCommitted
    | PayloadsReleased
    | VersionAnnounced
    | VersionCommitted
    | VersionAborted
    | EvaluationOpened
    | EvaluationScored
    | HistoryForgotten
    | StateCondensed
    | TaskKept
    | EpisodeKept
)

KINDS: dict[str, type[Transition]] = {
    "run_began": RunBegan,
    "task_opened": TaskOpened,
    "source_exhausted": SourceExhausted,
    "ticket_issued": TicketIssued,
    "episode_done": EpisodeDone,
    "attempt_ended": AttemptEnded,
    "task_moved": TaskMoved,
    "step_claimed": StepClaimed,
    "trainer_starved": TrainerStarved,
    "episode_lost": EpisodeLost,
    "step_unclaimed": StepUnclaimed,
    "step_reformed": StepReformed,
    "step_trained": StepTrained,
    "run_closed": RunClosed,
    "trainer_acquired": TrainerAcquired,
    "checkpoint_committed": CheckpointCommitted,
    "payloads_released": PayloadsReleased,
    "version_announced": VersionAnnounced,
    "version_committed": VersionCommitted,
    "version_aborted": VersionAborted,
    "evaluation_opened": EvaluationOpened,
    "evaluation_scored": EvaluationScored,
    "history_forgotten": HistoryForgotten,
    "state_condensed": StateCondensed,
    "task_kept": TaskKept,
    "episode_kept": EpisodeKept,
}
"""Name of each kind in a journal; a name is never given another meaning."""

CONDENSED = frozenset({"state_condensed", "task_kept", "episode_kept"})
"""Kinds that a condensed journal begins with; no decision records one."""

_NAMES = {cls: name for name, cls in KINDS.items()}
_READERS: dict[str, Callable[[Any], Any]] = {
    "cause": Cause,
    "state": TaskState,
    "episode_state": EpisodeState,
    "ended": lambda cause: None if cause is None else Cause(cause),
}

WithPayload: TypeAlias = EpisodeDone | EpisodeKept
"""What may come with payload bytes, `inline`: those of the episode `episode_id`."""

INLINED = ("episode_done", "episode_kept")
"""Its kinds."""


def kind_of(transition: Transition) -> str:
    """The name of its kind."""
    return _NAMES[type(transition)]


def to_body(transition: Transition) -> dict[str, Any]:
    """The transition as JSON values, without its kind and without payload bytes."""
    body = _fields(transition)
    if isinstance(transition, WithPayload):
        del body["inline"]
        body["result"] = None if transition.result is None else _result_fields(transition.result)
    return body


def from_body(kind: str, body: Mapping[str, Any], inline: bytes | None = None) -> Transition:
    """The inverse of `kind_of` and `to_body`; raises LedgerFormatError where there is none."""
    try:
        values: dict[str, Any] = {
            name: _READERS.get(name, _tuple)(value) for name, value in body.items()
        }
        if kind in INLINED:
            result = None if body["result"] is None else _result(body["result"])
            values |= {"inline": inline, "result": result}
        return KINDS[kind](**values)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LedgerFormatError(
            f"not a transition: {kind} {body!r:.200}: {error!r}", field=kind, value=repr(error)
        ) from error


def _fields(record: Any) -> dict[str, Any]:
    names, values = _getter(record.__class__)
    return dict(zip(names, values(record), strict=True))


@functools.cache
def _getter(kind: Any) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    """The names of its fields, and what reads them all from a record."""
    names = tuple(field.name for field in dataclasses.fields(kind))
    if len(names) == 1:
        return names, lambda record: (getattr(record, names[0]),)
    return names, operator.attrgetter(*names)


def _result_fields(result: Result) -> dict[str, Any]:
    return _fields(result) | {"media": [_fields(medium) for medium in result.media]}


def _result(body: Mapping[str, Any]) -> Result:
    values: dict[str, Any] = {name: _tuple(value) for name, value in body.items()}
    values["termination"] = Termination(body["termination"])
    values["media"] = tuple(Medium(**medium) for medium in body.get("media", ()))
    return Result(**values)


def _tuple(value: Any) -> Any:
    """JSON has no tuples; no field of a transition is a list."""
    if isinstance(value, list):
        return tuple(_tuple(each) for each in cast("list[Any]", value))
    return value
