"""Advantage plugin `rloo`: how far a reward lies from the mean of the others of its group.

A = R - (sum - R) / (n - 1); "Back to Basics" (arXiv 2402.14740), 2.2. Unbiased.
Shapes: n = episodes of a step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.advantages import Advantages, by_group, centred


@dataclass(frozen=True, slots=True)
class Rloo:
    """Advantage plugin `rloo`; nothing to configure."""

    def __call__(
        self,
        rewards: NDArray[np.floating],
        groups: NDArray[np.integer] | None = None,
        tokens: NDArray[np.integer] | None = None,
        segments: NDArray[np.integer] | None = None,
    ) -> Advantages:
        """(R - mean) n / (n - 1), which is the formula above; of one reward the reward itself.

        All that have a reward enter.
        """
        return Advantages(by_group(rewards, groups, _of_group), ~np.isnan(rewards))


def _of_group(known: NDArray[np.floating]) -> NDArray[np.floating]:
    if known.size == 1:
        return known
    return centred(known) * known.dtype.type(known.size / (known.size - 1))
