"""Advantage plugin `grpo`: how far a reward lies from its group's mean, in deviations.

A = (R - mean) / (std + epsilon), the unbiased std; "DeepSeekMath" (arXiv 2402.03300), 4.1.2.
Shapes: n = episodes of a step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.advantages import Advantages, by_group, members_of


@dataclass(frozen=True, slots=True)
class Grpo:
    """Advantage plugin `grpo`. Its fields are its configuration."""

    epsilon: float = 1e-9
    """Added to the deviation."""

    def __call__(
        self,
        rewards: NDArray[np.floating],
        groups: NDArray[np.integer] | None = None,
        tokens: NDArray[np.integer] | None = None,
        segments: NDArray[np.integer] | None = None,
    ) -> Advantages:
        """(R - mean) / (std + epsilon) over the rewards of the group that are there.

        Where fewer than two are there, or all are equal, the group says nothing: its advantages
        are exactly 0 and none enters.
        """
        enters = ~np.isnan(rewards)
        for members in members_of(rewards, groups):
            known = rewards[members][enters[members]]
            if known.size < 2 or np.all(known == known[0]):
                enters[members] = False
        return Advantages(by_group(rewards, groups, self._of_group), enters)

    def _of_group(self, known: NDArray[np.floating]) -> NDArray[np.floating]:
        # Compared as they are: the rounded mean of equal rewards may differ from each of them.
        if known.size < 2 or np.all(known == known[0]):
            return np.zeros_like(known)
        deviation = known - known.mean()
        std = np.sqrt(np.sum(deviation**2) / (known.size - 1))
        return deviation / (std + known.dtype.type(self.epsilon))
