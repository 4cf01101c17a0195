"""All episodes of a run as its journal tells them, for readers: nothing here writes or decides."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle_core.episodes import Segment
from treadle_core.errors import PayloadMissingError
from treadle_core.tickets import Json
from treadle_experience.core.apply import apply
from treadle_experience.core.state import (
    Checkpoint,
    Episode,
    EpisodeState,
    Result,
    RunState,
    Task,
)
from treadle_experience.core.transitions import (
    HistoryForgotten,
    PayloadsReleased,
    TaskKept,
    TaskOpened,
    WithPayload,
)
from treadle_experience.ledgers import CONFIG, read_ledger
from treadle_experience.payloads import load
from treadle_payloads.codec import decode_payload
from treadle_payloads.files import FileStore
from treadle_payloads.store import PayloadStore
from treadle_runtime.config import read_yaml


@dataclass(frozen=True, slots=True)
class Record:
    """One episode, and what became of it."""

    episode_id: str
    task_id: str
    order: int
    """Rank of its task in the run, or in its evaluation."""
    spec: Mapping[str, Json]
    evaluation: str
    """Set that it scores; empty in training."""
    step: int
    """Step that trained it, or is to; of an evaluation, the step that is scored. 0: none yet."""
    episode_state: str
    task_state: str
    reason: str
    """Why its task was filtered, evicted or quarantined."""
    attempt: int
    replica_id: str
    result: Result | None
    inline: bytes | None
    released_by: Checkpoint | None
    """Newest checkpoint when its payload was released."""

    @property
    def state(self) -> str:
        """What became of the task once the episode is done; till then, where the episode is."""
        done = self.episode_state == EpisodeState.DONE
        return self.task_state if done else self.episode_state

    @property
    def trace_id(self) -> str:
        """32 hex digits; empty where nothing was traced."""
        parts = self.result.traceparent.split("-") if self.result else []
        return parts[1] if len(parts) == 4 else ""

    def row(self) -> dict[str, Any]:
        """The record as flat JSON; what is not known yet is absent."""
        row: dict[str, Any] = {
            "episode": self.episode_id,
            "task": self.task_id,
            "evaluation": self.evaluation,
            "step": self.step,
            "state": self.state,
            "reason": self.reason,
            "attempt": self.attempt,
            "replica": self.replica_id,
        }
        if self.result is None:
            return row
        row |= {} if self.result.reward is None else {"reward": self.result.reward}
        return row | {
            "termination": self.result.termination.value,
            "tokens": self.result.num_tokens,
            "trained_tokens": self.result.num_trained,
            "versions": list(self.result.versions),
            "media": len(self.result.media),
            "metrics": dict(self.result.metrics),
            "trace_id": self.trace_id,
        }


def read_episodes(directory: Path) -> list[Record]:
    """Every episode that the run in `directory` remembers, in the order of its tasks.

    Raises as `read_ledger`, and LedgerFormatError when the journal does not follow.
    """
    state = RunState()
    tasks: dict[str, Task] = {}
    specs: dict[str, Mapping[str, Json]] = {}
    inline: dict[str, bytes | None] = {}
    released: dict[str, Checkpoint | None] = {}
    for transition in read_ledger(directory).journal:
        if isinstance(transition, HistoryForgotten):
            tasks |= {id_: state.tasks[id_] for id_ in transition.task_ids}
        apply(state, transition)
        if isinstance(transition, TaskOpened | TaskKept):
            specs[transition.task_id] = transition.spec
        elif isinstance(transition, WithPayload):
            inline[transition.episode_id] = transition.inline
        elif isinstance(transition, PayloadsReleased):
            released |= dict.fromkeys(transition.episode_ids, state.head())
    return [
        _record(
            task,
            each,
            specs[task.task_id],
            inline.get(each.episode_id),
            released.get(each.episode_id),
        )
        for task in (tasks | state.tasks).values()
        for each in task.episodes
    ]


def payloads_of(directory: Path) -> PayloadStore | None:
    """Where the heavy payloads of a run lie on this host; None where there are none."""
    path = Path(payload_parameters(directory).get("directory") or directory / "payloads")
    return FileStore(path) if path.is_dir() else None


def payload_parameters(directory: Path) -> Mapping[str, Any]:
    """What the run in `directory` says of its payload store."""
    told = directory / CONFIG
    run: dict[str, Any] = read_yaml(told).get("run", {}) if told.is_file() else {}
    return run.get("payloads", {})


def read_segments(record: Record, store: PayloadStore | None) -> tuple[Segment, ...]:
    """The tokens of an episode that is done.

    Raises PayloadMissingError, saying why, where they are not there any more, and
    PayloadCorruptError or InvalidFieldError where they are damaged.
    """
    if record.released_by is not None:
        checkpoint = record.released_by
        raise _missing(
            record,
            f"was released when the checkpoint of step {checkpoint.step} ({checkpoint.path}) was "
            "committed: no restore needs it",
        )
    if record.result is None:
        raise _missing(record, f"is not there: it is {record.state}")
    return decode_payload(load(record.result, record.inline, store))


def _record(
    task: Task,
    episode: Episode,
    spec: Mapping[str, Json],
    inline: bytes | None,
    released_by: Checkpoint | None,
) -> Record:
    return Record(
        episode_id=episode.episode_id,
        task_id=task.task_id,
        order=task.order,
        spec=spec,
        evaluation=task.evaluation.name if task.evaluation else "",
        step=task.evaluation.step if task.evaluation else task.step,
        episode_state=episode.state.value,
        task_state=task.state.value,
        reason=task.reason,
        attempt=episode.attempt,
        replica_id=episode.replica_id,
        result=episode.result,
        inline=inline,
        released_by=released_by,
    )


def _missing(record: Record, why: str) -> PayloadMissingError:
    return PayloadMissingError(
        f"the payload of episode {record.episode_id} {why}",
        field="episode",
        value=record.episode_id,
    )
