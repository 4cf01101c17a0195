"""Work as it travels from the ledger to a replica."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""What a task may hold: JSON, never code."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the policy samples. Nothing is taken from a checkpoint's generation config."""

    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    max_tokens: int = 256
    """Most tokens that one turn may sample."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The right to run one episode, once; fenced by its attempt."""

    episode_id: str
    attempt: int
    """Counts from 1; a late result of an older attempt is refused."""
    task_id: str
    index: int
    """Place of the episode in its group, from 0."""
    spec: Mapping[str, Json]
    """The task, as its source made it."""
    sampling: Sampling
    deadline_s: float
    """Wall-clock seconds from the lease after which the episode has failed."""
    evaluation: str = ""
    """Name of the evaluation that the episode is scored in; empty for training."""
