"""Advantage plugin `grpo`: how far a reward lies from its group's mean, in deviations."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.advantages import Advantages


@dataclass(frozen=True, slots=True)
class Grpo:
    """Advantage plugin `grpo`. Its fields are its configuration."""

    epsilon: float = 1e-9
    """Added to the deviation."""

    def __call__(self, rewards: NDArray[np.floating]) -> Advantages:
        """(R - mean) / (std + epsilon) with the unbiased std, over the rewards that are there.

        A missing reward (NaN) is no part of mean and std. Where fewer than two are there, or all
        are equal, the group says nothing: its advantages are exactly 0 and none enters.
        """
        values = np.zeros_like(rewards)
        present = ~np.isnan(rewards)
        known = rewards[present]
        # Compared as they are: the rounded mean of equal rewards may differ from each of them.
        if known.size < 2 or np.all(known == known[0]):
            return Advantages(values, np.zeros(rewards.shape, np.bool_))
        deviation = known - known.mean()
        std = np.sqrt(np.sum(deviation**2) / (known.size - 1))
        values[present] = deviation / (std + rewards.dtype.type(self.epsilon))
        return Advantages(values, present)
