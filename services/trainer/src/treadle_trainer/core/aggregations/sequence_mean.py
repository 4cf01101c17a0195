"""Aggregation plugin `sequence_mean`: every episode counts the same, every token of it too.

L = 1/N sum over episodes i of (1/T_i) (sum of l_t over its tokens); "DeepSeekMath" (arXiv
2402.03300), 4.1. Tokens of short episodes weigh more. Shapes: S = segments.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.aggregations import Shares, Unit, Window, inverse


@dataclass(frozen=True, slots=True)
class SequenceMean:
    """Aggregation plugin `sequence_mean`. Its fields are its configuration."""

    unit: Unit = "episode"
    """What is one sequence."""

    def weights(self, shares: Shares) -> NDArray[np.float64]:
        """1 / tokens of the sequence."""
        by_segment = self.unit == "segment"
        return inverse(shares.of_segment if by_segment else shares.of_episode)

    def normaliser(self, window: Window) -> float:
        """Sequences, those without a trained token included."""
        return float(window.num_segments if self.unit == "segment" else window.num_episodes)
