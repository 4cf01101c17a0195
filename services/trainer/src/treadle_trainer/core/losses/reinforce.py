"""Loss plugin `reinforce`: the plain policy gradient.

"Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning" (1992).
It has no ratio: what makes it right for tokens that another policy sampled is the correction.
Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

import torch

from treadle_trainer.core.losses import TokenLosses, Tokens, ratio_sums


@dataclass(frozen=True, slots=True)
class Reinforce:
    """Loss plugin `reinforce`: the loss of a token is -A log p. Nothing to configure."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """The loss of each token; sums as `ratio_sums`, of which none is clipped."""
        logprobs_T = tokens.logprobs.where(tokens.mask, 0.0)
        none_T = torch.zeros_like(tokens.mask)
        sums = ratio_sums(tokens.log_ratio.detach(), none_T, tokens.mask)
        return TokenLosses(-tokens.finite_advantages * logprobs_T, sums)
