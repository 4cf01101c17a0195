"""What a recipe has made of rewards before advantages: shape, then clip.

A missing reward is NaN, and stays one. Shapes: n = episodes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core import rewards


@dataclass(frozen=True, slots=True)
class Overlong:
    """A ramp for long episodes; `rewards.shape_overlong` has the formula and its source."""

    max_tokens: int
    """Tokens of an episode's longest segment at which all of `factor` is lost."""
    buffer: int
    """Tokens before, over which it is lost more and more."""
    factor: float = 1.0
    """Reward lost at the end of the ramp."""


@dataclass(frozen=True, slots=True)
class Shaping:
    """What is done to rewards; nothing by default. Its fields are its configuration."""

    overlong: Overlong | None = None
    stop_properly: float | None = None
    """What a truncated episode keeps of its reward; below 0, what it gets instead."""
    clip: tuple[float, float] | None = None
    """Least and greatest reward."""

    def __post_init__(self) -> None:
        """Raises InvalidFieldError where both ways to shape are asked for, or one cannot be."""
        if self.overlong is not None and self.stop_properly is not None:
            limit = "overlong or stop_properly, since both are for episodes that do not end"
            raise InvalidFieldError("shaping", limit=limit, value="both")
        none = np.zeros(0)
        self(none, none.astype(np.int64), none.astype(np.bool_))

    @property
    def shapes(self) -> bool:
        """Whether anything is done."""
        return self != Shaping()

    def __call__(
        self,
        raw: NDArray[np.floating],
        lengths: NDArray[np.integer],
        truncated: NDArray[np.bool_],
    ) -> NDArray[np.floating]:
        """Shapes rewards, by the tokens of each episode's longest segment, all [n]."""
        found = raw
        if (ramp := self.overlong) is not None:
            found = rewards.shape_overlong(
                found, lengths, max_tokens=ramp.max_tokens, buffer=ramp.buffer, factor=ramp.factor
            )
        if self.stop_properly is not None:
            found = rewards.shape_stop_properly(found, truncated, coefficient=self.stop_properly)
        return found if self.clip is None else rewards.clip(found, *self.clip)
