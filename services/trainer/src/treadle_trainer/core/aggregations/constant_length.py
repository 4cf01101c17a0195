"""Aggregation plugin `constant_length`: sums over episodes, divided by one length for all.

L = 1/(N length) sum over episodes of (sum of l_t); "Understanding R1-Zero-Like Training" (arXiv
2503.20783), 3.2. With an unbiased advantage its gradient is the policy gradient / length.
Shapes: S = segments.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.aggregations import Shares, Unit, Window


@dataclass(frozen=True, slots=True)
class ConstantLength:
    """Aggregation plugin `constant_length`. Its fields are its configuration."""

    length: int
    """Tokens that an episode may have trained at most, or any other constant, at least 1."""
    unit: Unit = "episode"
    """What N counts."""

    def __post_init__(self) -> None:
        """Refuses a length that nothing could be divided by."""
        if self.length < 1:
            raise InvalidFieldError("length", limit=">= 1", value=self.length)

    def weights(self, shares: Shares) -> NDArray[np.float64]:
        """1 / length."""
        return np.full(shares.of_segment.shape, 1.0 / self.length)

    def normaliser(self, window: Window) -> float:
        """Sequences, those without a trained token included."""
        return float(window.num_segments if self.unit == "segment" else window.num_episodes)
