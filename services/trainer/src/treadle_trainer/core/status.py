"""What a trainer says of itself."""

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What it does now."""

    STARTING = "starting"
    """Loads a model or a checkpoint."""
    CLAIMING = "claiming"
    """Waits for the batch of the next step."""
    TRAINING = "training"
    """Computes a step."""
    CHECKPOINTING = "checkpointing"
    """Writes a checkpoint."""
    PUBLISHING = "publishing"
    """Publishes a version."""
    COMPLETE = "complete"
    """All steps are done."""


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """A moment in the life of a trainer."""

    trainer_epoch: int
    """Epoch under which it holds the run; 0 before it does."""
    step: int
    """Last step that it trained or restored."""
    phase: Phase
    waited_s: float
    """Seconds since its start in which it waited for a batch."""
    up_s: float
    """Seconds since its start."""
