"""A loss that does not ask who sampled a token. For the docs' lesson on lag; not for use.

`trainer.loss={name: "examples/calculator/uncorrected.py:Uncorrected"}` in a recipe.

Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from treadle_trainer.core.losses import LossTerm, token_mean


@dataclass(frozen=True, slots=True)
class Uncorrected:
    """The policy gradient as if the present policy had sampled: the loss of a token is -A log p."""

    def __call__(
        self,
        logprobs_T: Tensor,
        recorded_T: Tensor,
        advantages_T: Tensor,
        mask_T: Tensor,
        *,
        num_tokens: int,
    ) -> LossTerm:
        """Recorded log-probabilities enter the metrics alone."""
        log_ratio_T = (logprobs_T - recorded_T).detach()
        sums = {"kl_k1": -log_ratio_T.sum(), "ratio": log_ratio_T.exp().sum()}
        return LossTerm(token_mean(-advantages_T * logprobs_T, mask_T, num_tokens), sums)
