"""Loss plugin `gspo`: the clipped surrogate with one ratio for a whole segment.

"Group Sequence Policy Optimization" (arXiv 2507.18071), its variant GSPO-token.
Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from treadle_trainer.core.log_ratios import segment_mean
from treadle_trainer.core.losses import TokenLosses, Tokens, ratio_sums
from treadle_trainer.core.losses.ppo_clip import PpoClip, check_bounds


@dataclass(frozen=True, slots=True)
class Gspo:
    """Loss plugin `gspo`. Its fields are its configuration.

    The loss of a token is that of `ppo_clip` at s = exp(mean of log r over its segment). The value
    of s is the same for all tokens of a segment, its gradient that of the token's log p alone:
    log s_t = mean + log p_t - stop_gradient(log p_t). Each log r is clamped before the mean.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __post_init__(self) -> None:
        """Refuses bounds that make no interval around 1."""
        check_bounds(self.clip_low, self.clip_high)

    def __call__(self, tokens: Tokens) -> TokenLosses:
        """The loss of each token; sums as `ratio_sums`, of the tokens' own ratios."""
        log_ratio_T = tokens.log_ratio
        means = segment_mean(log_ratio_T.detach(), tokens.mask, tokens.segments)
        logprobs_T = tokens.logprobs.where(tokens.mask, 0.0)
        shared_T = means[tokens.segments] + logprobs_T - logprobs_T.detach()
        surrogate = PpoClip(self.clip_low, self.clip_high).surrogate
        losses_T, clipped_T = surrogate(shared_T, tokens.finite_advantages)
        return TokenLosses(losses_T, ratio_sums(log_ratio_T, clipped_T, tokens.mask))
