"""Loss plugin `ppo_clip`: the clipped surrogate.

"Proximal Policy Optimization Algorithms" (arXiv 1707.06347); two bounds as in "DAPO" (arXiv
2503.14476), the dual clip as in "Mastering Complex Control in MOBA Games" (arXiv 1912.09729).
Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.losses import TokenLosses, Tokens, ratio_sums


@dataclass(frozen=True, slots=True)
class PpoClip:
    """Loss plugin `ppo_clip`. Its fields are its configuration.

    The loss of a token is -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), where r is its
    probability now over its old probability.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Above 1: bounds the loss of a token with A < 0 at dual_clip * |A|."""

    def __post_init__(self) -> None:
        """Refuses bounds that make no interval around 1."""
        check_bounds(self.clip_low, self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise InvalidFieldError("dual_clip", limit="> 1", value=self.dual_clip)

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """The loss of each token; sums as `ratio_sums`."""
        log_ratio_T = tokens.log_ratio
        losses_T, clipped_T = self.surrogate(log_ratio_T, tokens.finite_advantages)
        return TokenLosses(losses_T, ratio_sums(log_ratio_T, clipped_T, tokens.mask))

    def surrogate(self, log_ratio_T: Tensor, advantages_T: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each token, and bool: its surrogate is clipped."""
        ratio_T = log_ratio_T.exp()
        plain_T = ratio_T * advantages_T
        clipped_T = ratio_T.clamp(1 - self.clip_low, 1 + self.clip_high) * advantages_T
        surrogate_T = torch.minimum(plain_T, clipped_T)
        if self.dual_clip is not None:
            bounded_T = torch.maximum(surrogate_T, self.dual_clip * advantages_T)
            surrogate_T = torch.where(advantages_T < 0, bounded_T, surrogate_T)
        return -surrogate_T, clipped_T < plain_T


def check_bounds(clip_low: float, clip_high: float) -> None:
    """Raises InvalidFieldError unless 1 - clip_low to 1 + clip_high is an interval around 1."""
    if not 0 < clip_low <= 1:
        raise InvalidFieldError("clip_low", limit="in (0, 1]", value=clip_low)
    if not clip_high > 0:
        raise InvalidFieldError("clip_high", limit="> 0", value=clip_high)
