"""Aggregation plugins (`treadle.aggregations`), one file each: how losses of tokens become one.

Every one of them is linear: the loss of a step is (sum of weight_t loss_t) / normaliser, where
weights and normaliser are counted over the whole optimiser step, all ranks, before the first
forward pass. So the gradient depends neither on micro-batches nor on ranks.

Shapes: S = segments.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Unit = Literal["episode", "segment"]
"""What is one sequence. Molt counts segments, so that an episode of k segments counts k times."""


@dataclass(frozen=True, slots=True)
class Window:
    """Counts of what enters one optimiser step, over all ranks; what trains no token included."""

    num_tokens: int
    """Trained tokens."""
    num_episodes: int
    num_segments: int
    num_prompts: int
    """Groups with a trained token."""


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """What each segment is part of, in trained tokens over all ranks, [S]."""

    of_segment: NDArray[np.integer]
    of_episode: NDArray[np.integer]
    """Of all segments of its episode."""
    of_prompt: NDArray[np.integer]
    """Of all segments of its group."""


class Aggregation(Protocol):
    """Weighs the tokens of a step. Plugins are frozen dataclasses."""

    def weights(self, shares: Shares) -> NDArray[np.float64]:
        """The weight of each token of each segment, [S]; of one without tokens whatever."""
        ...

    def normaliser(self, window: Window) -> float:
        """What the weighted sum is divided by; 0 where nothing enters."""
        ...


def weighted_mean(losses_T: Tensor, weights_T: Tensor, mask_T: Tensor, normaliser: float) -> Tensor:
    """Share of these tokens in a step's loss, a scalar; whatever lies off the mask is 0.

    Shapes: T = predicted tokens. A normaliser of 0 says that there is nothing, which is 0.
    """
    return (torch.where(mask_T, losses_T, 0.0) * weights_T).sum() / (normaliser or 1.0)


def inverse(counts: NDArray[np.integer]) -> NDArray[np.float64]:
    """1 / count, and 1 where there is nothing to divide among."""
    return 1.0 / np.maximum(counts, 1)
