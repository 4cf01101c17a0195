"""Advantage plugin `batch_mean`: how far a reward lies from the mean of the whole step.

A = R - mean over the step, for one episode a task: FlashREINFORCE, with the loss `reinforce`, the
correction `gated` at level `seq` with gate `binary_kl`, and the aggregation `sequence_mean`. Its
gradient is (n - 1) / n of the policy gradient.
Shapes: n = episodes of a step.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.advantages import Advantages


@dataclass(frozen=True, slots=True)
class BatchMean:
    """Advantage plugin `batch_mean`. Its fields are its configuration."""

    unit: Literal["episode", "segment"] = "episode"
    """What counts once in the mean. Molt counts segments: long episodes weigh more."""

    def __call__(
        self,
        rewards: NDArray[np.floating],
        groups: NDArray[np.integer] | None = None,
        tokens: NDArray[np.integer] | None = None,
        segments: NDArray[np.integer] | None = None,
    ) -> Advantages:
        """R - mean; exactly 0 where all are equal. All that have a reward enter."""
        values, enters = np.zeros_like(rewards), ~np.isnan(rewards)
        known = rewards[enters]
        if known.size and not np.all(known == known[0]):
            shares = np.ones_like(known)
            if self.unit == "segment" and segments is not None:
                shares = segments[enters].astype(known.dtype)
            values[enters] = known - (known * shares).sum() / shares.sum()
        return Advantages(values, enters)
