"""A loss of one's own: one file, and one line of a recipe.

    treadle train recipes/calculator.yaml 'trainer.loss={name: "examples/custom_loss.py:Smooth"}'

The loss is Soft Adaptive Policy Optimization (arXiv 2511.20347): instead of a clip, a gate that
closes smoothly as the ratio moves away from 1. What a loss is told, and what it answers, says
`treadle_trainer.core.losses`. Micro-batches, ranks, aggregation, correction and KL are the
trainer's.

Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

import torch

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.losses import TokenLosses, Tokens, ratio_sums


@dataclass(frozen=True, slots=True)
class Smooth:
    """The loss of a token is -(4 / tau) sigmoid(tau (r - 1)) A."""

    tau_positive: float = 1.0
    """Of tokens with A > 0; the larger, the sooner the gate closes."""
    tau_negative: float = 1.05
    """Of all others."""

    def __post_init__(self) -> None:
        """Refuses a gate that would not close."""
        for name in ("tau_positive", "tau_negative"):
            if not getattr(self, name) > 0:
                raise InvalidFieldError(name, limit="> 0", value=getattr(self, name))

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """The loss of each token. `clip_fraction` counts gates that let through less than half."""
        log_ratio_T, advantages_T = tokens.log_ratio, tokens.finite_advantages
        tau_T = torch.where(advantages_T > 0, self.tau_positive, self.tau_negative)
        open_T = torch.sigmoid(tau_T * (log_ratio_T.exp() - 1))
        closed_T = 4 * open_T * (1 - open_T) < 0.5
        losses_T = -4 / tau_T * open_T * advantages_T
        return TokenLosses(losses_T, ratio_sums(log_ratio_T, closed_T, tokens.mask))
