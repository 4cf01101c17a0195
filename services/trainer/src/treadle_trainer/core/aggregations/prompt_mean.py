"""Aggregation plugin `prompt_mean`: every group counts the same, every token of it too.

L = 1/P sum over groups g of (1/T_g) (sum of l_t over the tokens of its episodes); as in "The Art of
Scaling Reinforcement Learning Compute for LLMs" (arXiv 2510.13786). Shapes: S = segments.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.aggregations import Shares, Window, inverse


@dataclass(frozen=True, slots=True)
class PromptMean:
    """Aggregation plugin `prompt_mean`; nothing to configure."""

    def weights(self, shares: Shares) -> NDArray[np.float64]:
        """1 / tokens of the group."""
        return inverse(shares.of_prompt)

    def normaliser(self, window: Window) -> float:
        """Groups with a trained token."""
        return float(window.num_prompts)
