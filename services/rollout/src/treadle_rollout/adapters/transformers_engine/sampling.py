"""The next token of every sequence, and how likely it was.

Shapes: M = sequences, V = vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle_rollout.adapters.transformers_engine import shaping
from treadle_rollout.adapters.transformers_engine.shaping import Drawn


def sample(
    logits: Tensor,
    temperatures: NDArray[np.float32],
    generator: torch.Generator,
    shaped: Sequence[Drawn] = (),
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Samples from softmax(logits / temperature), shaped where that is asked for.

    Temperature 0 takes the likeliest token; its log-probability is that of temperature 1, which
    is no distribution it was sampled from, so such tokens are never trained on.

    Args:
        logits: [M, V], any float dtype; computed with in float32.
        temperatures: [M], >= 0.
        generator: on the device of `logits`.
        shaped: rows of which more than the temperature is asked, ascending.

    Returns:
        Token ids [M] and their natural-log probabilities [M]; one that is not finite comes from
        logits that are not.
    """
    greedy = temperatures == 0
    logits = logits.float()
    rows = shaping.rows_of(shaped, logits.device) if shaped else None
    if rows is not None:
        logits = logits.index_copy(0, rows, shaping.moved(logits[rows], shaped))
    if np.any((temperatures != 1) & ~greedy):
        divisors = torch.from_numpy(np.where(greedy, np.float32(1), temperatures))
        logits = logits / divisors.to(logits.device)[:, None]
    if rows is not None:
        logits = logits.index_copy(0, rows, shaping.kept(logits[rows], shaped))
    logprobs = torch.log_softmax(logits, -1)
    if greedy.all():
        token_ids = logprobs.argmax(-1)
    else:
        token_ids = _draw(logprobs, generator, shaped)
        if greedy.any():
            mask = torch.from_numpy(greedy).to(logits.device)
            token_ids = torch.where(mask, logprobs.argmax(-1), token_ids)
    picked = logprobs.gather(1, token_ids[:, None])[:, 0]
    if logits.device.type == "cpu":
        return token_ids.numpy(), picked.numpy()
    # One copy to the host for both; float64 holds every token id exactly.
    both = torch.stack((token_ids.double(), picked.double())).cpu().numpy()
    return both[0].astype(np.int64), both[1].astype(np.float32)


def _draw(logprobs: Tensor, generator: torch.Generator, shaped: Sequence[Drawn]) -> Tensor:
    """Inverts the distribution function: one random number a sequence, not one a token."""
    cumulated = logprobs.exp().cumsum(-1)
    level = torch.rand(
        (logprobs.shape[0], 1), generator=generator, device=logprobs.device, dtype=torch.float32
    )
    if shaped:
        level = shaping.own_levels(level, shaped)
    below = (cumulated <= level * cumulated[:, -1:]).sum(-1)
    return below.clamp_(max=logprobs.shape[1] - 1)
