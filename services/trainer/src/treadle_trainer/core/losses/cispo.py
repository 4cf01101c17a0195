"""Loss plugin `cispo`: REINFORCE weighted by a truncated ratio; no token loses its gradient.

"MiniMax-M1" (arXiv 2506.13585), 3.1. Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.losses import TokenLosses, Tokens, ratio_sums


@dataclass(frozen=True, slots=True)
class Cispo:
    """Loss plugin `cispo`. Its fields are its configuration.

    The loss of a token is -stop_gradient(min(r, ceiling)) A log p.
    """

    ceiling: float = 5.0
    """Largest weight, itself and not its distance from 1; at least 1."""

    def __post_init__(self) -> None:
        """Refuses a ceiling that would scale down what is on-policy."""
        if not self.ceiling >= 1:
            raise InvalidFieldError("ceiling", limit=">= 1", value=self.ceiling)

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """The loss of each token; sums as `ratio_sums`."""
        log_ratio_T = tokens.log_ratio.detach()
        ratio_T = log_ratio_T.exp()
        logprobs_T = tokens.logprobs.where(tokens.mask, 0.0)
        losses_T = -ratio_T.clamp(max=self.ceiling) * tokens.finite_advantages * logprobs_T
        return TokenLosses(losses_T, ratio_sums(log_ratio_T, ratio_T > self.ceiling, tokens.mask))
