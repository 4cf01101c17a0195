"""What a condensed journal begins with: transitions that are made of a state, not by a decision."""

import dataclasses
from collections.abc import Mapping

from treadle_core.tickets import Json
from treadle_experience.core.state import Cause, EpisodeState, Result, TaskState


@dataclasses.dataclass(frozen=True, slots=True)
class StateCondensed:
    """Stands first in a journal for all that came before, followed by the tasks that are kept."""

    position: int
    """Its own, in the journal that it condenses."""
    values: Mapping[str, Json]
    """Fields of the state by name, less tasks and episodes (`condensation`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class TaskKept:
    """A task of a condensed state, followed by its episodes."""

    task_id: str
    order: int
    spec: Mapping[str, Json]
    evaluation: str
    evaluated_step: int
    state: TaskState
    reason: str
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class EpisodeKept:
    """An episode of a condensed state."""

    episode_id: str
    task_id: str
    index: int
    episode_state: EpisodeState
    attempt: int
    replica_id: str
    version: int
    charged: int
    spanned: int
    ended: Cause | None
    released: bool
    result: Result | None
    inline: bytes | None
    """As in `EpisodeDone`."""
