"""Advantage plugins (`treadle.advantages`), one file each, and what they share.

Shapes: n = episodes of a step.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What the episodes of a step weigh."""

    values: NDArray[np.floating]
    """Advantage of each episode, [n]; 0 where it does not enter."""
    enters: NDArray[np.bool_]
    """The episode enters the loss and its denominator, [n]."""


class Advantage(Protocol):
    """Turns the rewards of a step into advantages. Plugins are frozen dataclasses.

    An episode counts once, however many segments it has.
    """

    def __call__(
        self,
        rewards: NDArray[np.floating],
        groups: NDArray[np.integer] | None = None,
        tokens: NDArray[np.integer] | None = None,
        segments: NDArray[np.integer] | None = None,
    ) -> Advantages:
        """Answers in the dtype of the rewards.

        Args:
            rewards: [n], NaN where an episode has none: it is left out of every mean and does not
                enter.
            groups: number of each episode's group, [n]; None where all are of one.
            tokens: tokens that each would train, [n]; None for as many each.
            segments: segments of each, [n]; None for as many each.
        """
        ...


def by_group(
    rewards: NDArray[np.floating],
    groups: NDArray[np.integer] | None,
    estimate: Callable[[NDArray[np.floating]], NDArray[np.floating]],
) -> NDArray[np.floating]:
    """What `estimate` makes of the rewards that are there, group by group, [n]; 0 elsewhere."""
    values = np.zeros_like(rewards)
    for members in members_of(rewards, groups):
        known = members[~np.isnan(rewards[members])]
        if known.size:
            values[known] = estimate(rewards[known])
    return values


def members_of(
    rewards: NDArray[np.floating], groups: NDArray[np.integer] | None
) -> Iterator[NDArray[np.integer]]:
    """Places of the episodes of each group, in the order of their numbers."""
    if groups is None:
        yield np.arange(rewards.size)
        return
    for group in np.unique(groups):
        yield np.flatnonzero(groups == group)


def centred(known: NDArray[np.floating]) -> NDArray[np.floating]:
    """Distance of each from the mean, at least one; exactly 0 where all are equal."""
    # Compared as they are: the rounded mean of equal rewards may differ from each of them.
    return np.zeros_like(known) if np.all(known == known[0]) else known - known.mean()


def whiten(
    values: NDArray[np.floating], weights: NDArray[np.generic] | None = None
) -> NDArray[np.floating]:
    """(A - mean) / sqrt(max(variance, 1e-8)), the population's, each value weighted.

    A mask as weights takes the statistics of what lies on it; what lies off it, and a value of
    weight 0, becomes 0, whatever it was. For episodes the weights are their tokens, so that mean
    and variance are those of all tokens of the step.
    """
    counted = np.ones(values.shape, values.dtype) if weights is None else weights
    shares = counted.astype(values.dtype)
    total = shares.sum()
    if not total:
        return np.zeros_like(values)
    on = shares > 0
    known = np.where(on, values, 0)
    mean = (known * shares).sum() / total
    deviation = np.where(on, known - mean, 0)
    variance = (deviation**2 * shares).sum() / total
    return deviation / np.sqrt(np.maximum(variance, values.dtype.type(1e-8)))
