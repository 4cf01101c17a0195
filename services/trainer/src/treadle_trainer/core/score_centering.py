"""Score centering: takes out of the gradient what a sampler that is off puts there for no reward.

Adds A_t c_t to the loss of a token, c_t = sum over the head H of the vocabulary of
stop_gradient(q f(p / q) - alpha p) log p, with p the trainer's and q the sampler's probabilities,
f what the correction makes of a ratio, and for the tail alpha = rho f(1 / rho) with rho =
(1 - sum_H q) / (1 - sum_H p). Then the expected gradient is 0 where the reward says nothing
(arXiv 2609.20807).
No part of a recipe: samplers do not record a head yet.
Shapes: T = predicted tokens, K = most probable tokens that the sampler recorded of each.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.log_ratios import MAX_LOG_RATIO, finite

Mode = Literal["none", "trunc", "clip", "mask"]
LEAST_MASS = 1e-6
"""Of a tail, so that it can be divided by."""


class Centred(NamedTuple):
    """What is to be added for each token."""

    corrections: Tensor
    """c_t with gradient, [T]; 0 off the mask."""
    sampler_mass: Tensor
    """Probability of the head for the sampler, [T]; 0 off the mask."""
    policy_mass: Tensor
    """Likewise for the trainer."""


def score_centering(
    logprobs_TK: Tensor,
    sampler_TK: Tensor,
    mask_T: Tensor,
    *,
    mode: Mode = "none",
    low: float | None = None,
    high: float | None = None,
) -> Centred:
    """Takes log-probabilities of the heads; mode and bounds as of `corrections.gated`, or none.

    Raises InvalidFieldError where a mode lacks a bound.
    """
    for name, bound in _needed(mode, low, high):
        if bound is None:
            raise InvalidFieldError(name, limit=f"a number with mode {mode}", value=None)
    mask_T1 = mask_T[:, None]
    logprobs_TK = torch.where(mask_T1, logprobs_TK, 0.0)
    with torch.no_grad():
        p_TK = torch.where(mask_T1, logprobs_TK.exp(), 0.0)
        q_TK = torch.where(mask_T1, sampler_TK, -torch.inf).exp()
        log_ratio_TK = finite(torch.where(mask_T1, logprobs_TK - sampler_TK, 0.0))
        ratio_TK = log_ratio_TK.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        tails = [(1 - head.sum(-1)).clamp(min=LEAST_MASS) for head in (q_TK, p_TK)]
        rho_T = tails[0] / tails[1]
        alpha_T = rho_T * _bounded(1 / rho_T, mode, low, high)
        weights_TK = q_TK * _bounded(ratio_TK, mode, low, high) - alpha_T[:, None] * p_TK
    corrections_T = torch.where(mask_T, (weights_TK * logprobs_TK).sum(-1), 0.0)
    return Centred(corrections_T, q_TK.sum(-1), p_TK.sum(-1))


def _needed(mode: Mode, low: float | None, high: float | None) -> list[tuple[str, float | None]]:
    return {
        "none": [],
        "trunc": [("high", high)],
        "clip": [("low", low), ("high", high)],
        "mask": [],
    }[mode]


def _bounded(ratio: Tensor, mode: Mode, low: float | None, high: float | None) -> Tensor:
    """What a correction makes of a ratio; without one 1."""
    if mode == "none":
        return torch.ones_like(ratio)
    if mode == "trunc":
        return ratio.clamp(max=high)
    if mode == "clip":
        return ratio.clamp(low, high)
    inside = torch.ones_like(ratio, dtype=torch.bool)
    if low is not None:
        inside &= ratio >= low
    if high is not None:
        inside &= ratio <= high
    return torch.where(inside, ratio, 0.0)
