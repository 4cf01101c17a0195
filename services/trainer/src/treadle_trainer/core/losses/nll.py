"""Loss `nll`: negative log-likelihood, for demonstrations.

Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from treadle_trainer.core.losses import LossTerm, token_mean


@dataclass(frozen=True, slots=True)
class NegativeLogLikelihood:
    """The mean over tokens of -log p; recorded log-probabilities and advantages play no part."""

    def __call__(
        self,
        logprobs_T: Tensor,
        recorded_T: Tensor,
        advantages_T: Tensor,
        mask_T: Tensor,
        *,
        num_tokens: int,
    ) -> LossTerm:
        """Loss; no sums."""
        return LossTerm(token_mean(-logprobs_T, mask_T, num_tokens), {})
