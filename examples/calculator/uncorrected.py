"""A loss that does not ask who sampled a token. For the docs' lesson on lag; not for use.

`trainer.loss={name: "examples/calculator/uncorrected.py:Uncorrected"}` in a recipe.

Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from treadle_trainer.core.losses import TokenLosses, Tokens


@dataclass(frozen=True, slots=True)
class Uncorrected:
    """The policy gradient as if the present policy had sampled: the loss of a token is -A log p."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """Recorded log-probabilities enter the metrics alone."""
        log_ratio_T = (tokens.logprobs - tokens.old).detach()
        sums = {"kl_k1": -log_ratio_T.sum(), "ratio": log_ratio_T.exp().sum()}
        return TokenLosses(-tokens.advantages * tokens.logprobs, sums)
