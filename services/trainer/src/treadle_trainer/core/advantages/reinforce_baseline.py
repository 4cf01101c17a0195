"""Advantage plugin `reinforce_baseline`: the group's mean as baseline, then whitened over tokens.

A = whiten(R - mean); "REINFORCE++" (arXiv 2501.03262), its variant with a baseline.
Shapes: n = episodes of a step.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.advantages import Advantages, by_group, centred, whiten


@dataclass(frozen=True, slots=True)
class ReinforceBaseline:
    """Advantage plugin `reinforce_baseline`. Its fields are its configuration."""

    whiten: bool = True
    """Over all tokens of the step that have an advantage; else R - mean."""

    def __call__(
        self,
        rewards: NDArray[np.floating],
        groups: NDArray[np.integer] | None = None,
        tokens: NDArray[np.integer] | None = None,
        segments: NDArray[np.integer] | None = None,
    ) -> Advantages:
        """R - mean of the group, whitened with each episode weighted by its tokens."""
        values, enters = by_group(rewards, groups, centred), ~np.isnan(rewards)
        if self.whiten:
            values = whiten(values, enters if tokens is None else enters * tokens)
        return Advantages(values, enters)
