"""Aggregation plugin `token_mean`: every trained token of the step counts the same.

L = (sum of l_t) / (number of tokens); "DAPO" (arXiv 2503.14476), 3.3. Long episodes weigh more.
Shapes: S = segments.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.aggregations import Shares, Window


@dataclass(frozen=True, slots=True)
class TokenMean:
    """Aggregation plugin `token_mean`; nothing to configure."""

    def weights(self, shares: Shares) -> NDArray[np.float64]:
        """1."""
        return np.ones(shares.of_segment.shape)

    def normaliser(self, window: Window) -> float:
        """Trained tokens."""
        return float(window.num_tokens)
