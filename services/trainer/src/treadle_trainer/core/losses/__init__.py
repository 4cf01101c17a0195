"""Loss plugins (`treadle.losses`), one file each, and what they share.

A loss is a number for each token. How the numbers of a step become one is the aggregation's part
(`core.aggregations`); what is added to them besides, the objective's (`core.objective`).

Shapes: T = predicted tokens of a micro-batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from treadle_trainer.core.log_ratios import log_ratio


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """What a loss is told of the tokens of one micro-batch, [T] each."""

    logprobs: Tensor
    """Log-probability under the present parameters, with gradient."""
    old: Tensor
    """Log-probability under the policy that the ratio is taken to: the one that sampled the token
    (form `direct`), or that of the parameters before this step (form `decoupled`)."""
    advantages: Tensor
    mask: Tensor
    """bool; a token outside adds nothing, whatever the other arrays hold there."""
    segments: Tensor
    """Number of the token's segment, int64, ascending from 0."""

    @property
    def finite_advantages(self) -> Tensor:
        """Advantages, 0 where they are no number, and off the mask."""
        on_mask = torch.where(self.mask, self.advantages, 0.0)
        return on_mask.nan_to_num(0.0, posinf=0.0, neginf=0.0)

    @property
    def log_ratio(self) -> Tensor:
        """The logarithm of r = p / p_old, clamped to ± 30; 0 off the mask."""
        return log_ratio(self.logprobs, self.old, self.mask)


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """What a loss says of the tokens."""

    losses: Tensor
    """Loss of each, with gradient, [T]; off the mask whatever is finite."""
    sums: Mapping[str, Tensor]
    """Sums over the mask, scalars without gradient, by the metric that their mean is."""


class Loss(Protocol):
    """Turns log-probabilities into losses. Plugins are frozen dataclasses."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """The loss of each token of a micro-batch, to be minimised."""
        ...


@torch.no_grad()
def ratio_sums(log_ratio_T: Tensor, clipped_T: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
    """Metrics of a loss with a ratio r.

    `clip_fraction` counts clipped tokens, `ratio` is r, and `kl_k1` and `kl` (k3) estimate the
    divergence of the policy from the one that the ratio is taken to, in nats.
    """
    ratio_T = log_ratio_T.exp()
    return {
        "clip_fraction": (clipped_T & mask_T).sum(),
        "kl_k1": -log_ratio_T.sum(),
        "kl": (ratio_T - 1 - log_ratio_T).sum(),
        "ratio": torch.where(mask_T, ratio_T, 0.0).sum(),
    }
