"""Loss plugin `ppo_clip`: the clipped surrogate on the recorded log-probabilities.

Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.losses import LossTerm, token_mean

MAX_LOG_RATIO = 30.0
"""Log-ratios are clamped to ± this; beyond it there is no gradient."""


@dataclass(frozen=True, slots=True)
class PpoClip:
    """Loss plugin `ppo_clip`. Its fields are its configuration.

    The loss of a token is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), where r is its
    probability now over its probability when it was sampled.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Above 1: bounds the loss of a token with A < 0 at dual_clip * |A|."""

    def __post_init__(self) -> None:
        """Refuses bounds that make no interval around 1."""
        if not 0 < self.clip_low <= 1:
            raise InvalidFieldError("clip_low", limit="in (0, 1]", value=self.clip_low)
        if not self.clip_high > 0:
            raise InvalidFieldError("clip_high", limit="> 0", value=self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise InvalidFieldError("dual_clip", limit="> 1", value=self.dual_clip)

    def __call__(
        self,
        logprobs_T: Tensor,
        recorded_T: Tensor,
        advantages_T: Tensor,
        mask_T: Tensor,
        *,
        num_tokens: int,
    ) -> LossTerm:
        """The loss, and sums.

        `clip_fraction` counts tokens whose surrogate is clipped, `ratio` is r, and `kl_k1` and
        `kl` (k3) estimate the divergence of the policy from the one that sampled, in nats.
        """
        log_ratio_T = _log_ratio(logprobs_T, recorded_T, mask_T)
        losses_T, clipped_T = self.token_losses(log_ratio_T, advantages_T)
        with torch.no_grad():
            ratio_T = log_ratio_T.exp()
            sums = {
                "clip_fraction": (clipped_T & mask_T).sum(),
                "kl_k1": -log_ratio_T.sum(),
                "kl": (ratio_T - 1 - log_ratio_T).sum(),
                "ratio": torch.where(mask_T, ratio_T, 0.0).sum(),
            }
        return LossTerm(token_mean(losses_T, mask_T, num_tokens), sums)

    def token_losses(self, log_ratio_T: Tensor, advantages_T: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each token, and bool: its surrogate is clipped."""
        advantages_T = advantages_T.nan_to_num(0.0, posinf=0.0, neginf=0.0)
        ratio_T = log_ratio_T.exp()
        plain_T = ratio_T * advantages_T
        clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages_T
        surrogate_T = torch.minimum(plain_T, clipped_T)
        if self.dual_clip is not None:
            bounded_T = torch.maximum(surrogate_T, self.dual_clip * advantages_T)
            surrogate_T = torch.where(advantages_T < 0, bounded_T, surrogate_T)
        return -surrogate_T, clipped_T < plain_T


def _log_ratio(logprobs_T: Tensor, recorded_T: Tensor, mask_T: Tensor) -> Tensor:
    """Clamped log-ratio, 0 off the mask: a NaN after exp would still poison the gradient."""
    log_ratio_T = torch.where(mask_T, logprobs_T - recorded_T, 0.0)
    log_ratio_T = log_ratio_T.nan_to_num(0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO)
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
