"""Loss plugins (`treadle.losses`), one file each, and what they share.

Shapes: T = predicted tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LossTerm:
    """What some of a step's tokens add to its loss and to its metrics."""

    loss: Tensor
    """Scalar with gradient; the terms of a step sum to its loss."""
    sums: Mapping[str, Tensor]
    """Sums over the tokens, scalars without gradient, by the metric that their mean is."""


class Loss(Protocol):
    """Turns log-probabilities into a term of the loss. Plugins are frozen dataclasses."""

    def __call__(
        self,
        logprobs_T: Tensor,
        recorded_T: Tensor,
        advantages_T: Tensor,
        mask_T: Tensor,
        *,
        num_tokens: int,
    ) -> LossTerm:
        """Takes the tokens of one micro-batch.

        Args:
            logprobs_T: log-probability under the present parameters, with gradient.
            recorded_T: log-probability under the distribution that sampled the token.
            advantages_T: advantage of the token.
            mask_T: bool; a token outside adds nothing, whatever the other arrays hold there.
            num_tokens: tokens of the whole optimiser step that enter the loss, at least 1.
        """
        ...


def token_mean(losses_T: Tensor, mask_T: Tensor, num_tokens: int) -> Tensor:
    """Share of these tokens in the mean over `num_tokens`; whatever lies off the mask is 0."""
    return torch.where(mask_T, losses_T, 0.0).sum() / num_tokens
