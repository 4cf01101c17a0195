"""Loss `nll`: negative log-likelihood, for demonstrations.

Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from treadle_trainer.core.losses import TokenLosses, Tokens


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood:
    """-log p of each token; old log-probabilities and advantages play no part."""

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """The loss of each token; no sums."""
        return TokenLosses(-tokens.logprobs, {})
