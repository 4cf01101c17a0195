"""How far the trainer's log-probabilities are from the recorded ones.

Shapes: T = predicted tokens.
"""

import torch
from torch import Tensor

from treadle_trainer.core.log_ratios import finite


@torch.no_grad()
def mismatch_sums(logprobs_T: Tensor, recorded_T: Tensor, mask_T: Tensor) -> dict[str, Tensor]:
    """Sums over the mask, by the metric that their mean is.

    With d = log p_trainer - log p_sampler, in nats: `mismatch_kl` of -d, `mismatch_k3` of
    e^d - 1 - d, `mismatch_abs` of |d|; and `mismatch_tokens` counts tokens with d other than 0.
    """
    d_T = finite(torch.where(mask_T, logprobs_T - recorded_T, 0.0))
    return {
        "mismatch_kl": -d_T.sum(),
        "mismatch_k3": (d_T.exp() - 1 - d_T).sum(),
        "mismatch_abs": d_T.abs().sum(),
        "mismatch_tokens": (d_T != 0).sum(),
    }
