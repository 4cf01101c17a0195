"""Advantage plugin `reinforce`: the reward itself, or returns to go, whitened over tokens.

A_t = whiten(G_t), G_t = sum over u >= t of gamma^(u - t) r_u; "REINFORCE++" (arXiv 2501.03262).
Shapes: n = episodes of a step, S = segments, T = places.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treadle_trainer.core.advantages import Advantages, whiten

Axis = Literal["action", "dense"]
"""What one factor gamma is for: a step between actions, or a place, observations included."""


@dataclass(frozen=True, slots=True)
class Reinforce:
    """Advantage plugin `reinforce`, for gamma 1 and no KL in the reward: G_t is R at every token.

    Its fields are its configuration.
    """

    whiten: bool = True
    """Over all tokens of the step; else R, the plain and unbiased policy gradient."""

    def __call__(
        self,
        rewards: NDArray[np.floating],
        groups: NDArray[np.integer] | None = None,
        tokens: NDArray[np.integer] | None = None,
        segments: NDArray[np.integer] | None = None,
    ) -> Advantages:
        """R, whitened with each episode weighted by its tokens. All that have a reward enter."""
        enters = ~np.isnan(rewards)
        values = np.where(enters, rewards, 0)
        if self.whiten:
            values = whiten(values, enters if tokens is None else enters * tokens)
        return Advantages(values, enters)


def token_rewards(
    rewards_S: NDArray[np.floating],
    mask_ST: NDArray[np.bool_],
    kl_ST: NDArray[np.floating] | None = None,
    *,
    kl_coefficient: float = 0.0,
) -> NDArray[np.floating]:
    """r_t = -kl_coefficient kl_t, and on the last action the reward besides, [S, T].

    0 off the mask. A segment without an action has nowhere to put its reward.
    """
    found_ST = np.zeros(mask_ST.shape, rewards_S.dtype)
    if kl_ST is not None and kl_coefficient:
        found_ST -= np.where(mask_ST, kl_ST, 0) * rewards_S.dtype.type(kl_coefficient)
    rows_S = np.flatnonzero(mask_ST.any(1))
    last_S = mask_ST.shape[1] - 1 - mask_ST[rows_S, ::-1].argmax(1)
    found_ST[rows_S, last_S] += rewards_S[rows_S]
    return found_ST


def returns_to_go(
    rewards_ST: NDArray[np.floating],
    mask_ST: NDArray[np.bool_],
    *,
    gamma: float = 1.0,
    axis: Axis = "action",
) -> NDArray[np.floating]:
    """G_t of rewards at tokens, [S, T]; 0 off the mask."""
    found_ST = np.zeros_like(rewards_ST)
    running_S = np.zeros(len(rewards_ST), rewards_ST.dtype)
    for place in reversed(range(rewards_ST.shape[1])):
        acts_S = mask_ST[:, place]
        discounted_S = running_S * rewards_ST.dtype.type(gamma)
        kept_S = running_S if axis == "action" else discounted_S
        running_S = np.where(acts_S, rewards_ST[:, place] + discounted_S, kept_S)
        found_ST[:, place] = np.where(acts_S, running_S, 0)
    return found_ST
