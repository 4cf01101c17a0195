"""Advantage plugin `dr_grpo`: how far a reward lies from its group's mean.

A = R - mean; "Understanding R1-Zero-Like Training" (arXiv 2503.20783), 3.2. Its gradient is
(n - 1) / n of the policy gradient with n episodes a group: the mean holds the reward itself.
Shapes: n = episodes of a step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.advantages import Advantages, by_group, centred


@dataclass(frozen=True, slots=True)
class DrGrpo:
    """Advantage plugin `dr_grpo`; nothing to configure."""

    def __call__(
        self,
        rewards: NDArray[np.floating],
        groups: NDArray[np.integer] | None = None,
        tokens: NDArray[np.integer] | None = None,
        segments: NDArray[np.integer] | None = None,
    ) -> Advantages:
        """R - mean of the group; of one reward 0. All that have a reward enter.

        So does a group of equal rewards, as 0: a denominator that looked at rewards would bias the
        gradient.
        """
        return Advantages(by_group(rewards, groups, centred), ~np.isnan(rewards))
