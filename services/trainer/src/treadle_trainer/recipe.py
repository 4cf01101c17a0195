"""What a trainer trains, and what it works with."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from treadle_runtime.tracker import Tracker
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.losses import Loss
from treadle_trainer.core.ranks import NoFollowers
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.core.step import StepSettings
from treadle_trainer.ports import (
    Backend,
    CheckpointStore,
    Experience,
    Followers,
    PayloadReader,
    Refit,
)
from treadle_weights.transport import WeightSender


@dataclass(frozen=True, slots=True)
class Recipe:
    """What and how the trainer trains."""

    run_id: str
    holder: str
    """Names the trainer for the life of its process."""
    start: Path
    """Hugging Face folder of the start parameters."""
    checkpoint_every: int
    """Steps between checkpoints."""
    advantage: Advantage
    loss: Loss
    schedule: Schedule
    settings: StepSettings
    build_backend: Callable[[Path], Backend]
    """From a Hugging Face folder."""
    publish_every: int = 1
    """Steps between publications; the last step is always published."""
    no_progress_s: float = 600.0
    """Seconds without a batch after which an alarm is given, and given again."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the trainer works with."""

    experience: Experience
    refit: Refit
    sender: WeightSender
    payloads: PayloadReader
    store: CheckpointStore
    tracker: Tracker
    followers: Followers = field(default_factory=NoFollowers)
    clock: Callable[[], float] = time.monotonic
    """Seconds."""
