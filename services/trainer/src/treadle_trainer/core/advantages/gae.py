"""Generalised advantage estimation, from the values of a critic.

delta_t = r_t + gamma V_next - V_t, A_t = delta_t + gamma lambda A_next, where "next" is the next
action: observations between are transparent. "High-Dimensional Continuous Control Using Generalized
Advantage Estimation" (arXiv 1506.02438). No plugin: there is no critic yet.
Shapes: S = segments, T = places.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Estimate(NamedTuple):
    """What a critic's values make of rewards."""

    advantages: NDArray[np.floating]
    """[S, T], not whitened; 0 off the mask."""
    returns: NDArray[np.floating]
    """A_t + V_t, what the critic is to learn, [S, T]; 0 off the mask."""


def gae(
    rewards_ST: NDArray[np.floating],
    values_ST: NDArray[np.floating],
    mask_ST: NDArray[np.bool_],
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Estimate:
    """Takes rewards at tokens (`reinforce.token_rewards`) and values before them, all [S, T]."""
    scalar = rewards_ST.dtype.type
    advantages_ST = np.zeros_like(rewards_ST)
    advantage_S = np.zeros(len(rewards_ST), rewards_ST.dtype)
    next_value_S = np.zeros_like(advantage_S)
    values_ST = np.where(mask_ST, values_ST, 0)
    for place in reversed(range(rewards_ST.shape[1])):
        acts_S, value_S = mask_ST[:, place], values_ST[:, place]
        delta_S = rewards_ST[:, place] + scalar(gamma) * next_value_S - value_S
        found_S = delta_S + scalar(gamma * lam) * advantage_S
        advantage_S = np.where(acts_S, found_S, advantage_S)
        next_value_S = np.where(acts_S, value_S, next_value_S)
        advantages_ST[:, place] = np.where(acts_S, found_S, 0)
    return Estimate(advantages_ST, np.where(mask_ST, advantages_ST + values_ST, 0))
