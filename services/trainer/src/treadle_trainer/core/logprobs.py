"""Log-probabilities of tokens from logits.

Shapes: T = predicted tokens, V = vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import checkpoint

CHUNK_ELEMENTS = 1 << 24
"""Most logits that are held twice at once; 64 MiB in float32."""


def token_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    temperatures_T: Tensor,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-softmax of logits / temperature at the targets, and entropy in nats, both [T].

    The entropy has a gradient where it is asked for. Computed in float32, or wider where the
    logits are. What is larger than a chunk is computed chunk by chunk, and again in the backward
    pass, so that only the logits themselves are kept.
    """
    size = max(1, CHUNK_ELEMENTS // logits_TV.shape[1])
    if logits_TV.shape[0] <= size:
        return _logprobs(logits_TV, targets_T, temperatures_T, entropy_gradient=entropy_gradient)
    recomputed = cast("Any", checkpoint).checkpoint
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, logits_TV.shape[0], size):
        part = [array[start : start + size] for array in (logits_TV, targets_T, temperatures_T)]
        logprobs_T, entropy_T = recomputed(
            _logprobs, *part, entropy_gradient=entropy_gradient, use_reentrant=False
        )
        logprobs.append(logprobs_T)
        entropies.append(entropy_T)
    return torch.cat(logprobs), torch.cat(entropies)


def _logprobs(
    logits_TV: Tensor, targets_T: Tensor, temperatures_T: Tensor, *, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits_TV.dtype, torch.float32)
    scaled_TV = logits_TV.to(wide) / temperatures_T.to(wide)[:, None]
    logprobs_TV = scaled_TV.log_softmax(-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(-1, targets_T[:, None])[:, 0], entropy_T
