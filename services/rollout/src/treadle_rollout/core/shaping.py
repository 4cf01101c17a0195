"""The distribution that a token is sampled from, for one token at a time.

Engines that sample many at once compute the same in their own way and are checked against this.

Shapes: V = vocabulary, P = tokens of a prompt, N = tokens sampled so far.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle_core.tickets import Sampling

Reals = NDArray[np.float64]


def logprobs_of(
    logits: Reals, sampling: Sampling, prompt: NDArray[np.int32], turn: Sequence[int]
) -> Reals:
    """Natural-log probability of each token, [V]; -inf where `sampling` leaves none.

    Args:
        logits: as the policy gives them, [V].
        sampling: all its fields but `seed`, `schema` and `grammar`; temperature 0 counts as 1.
        prompt: [P].
        turn: what was sampled after it, [N].
    """
    logits = logits.astype(np.float64)
    if sampling.shaped:
        logits = _penalised(logits, sampling, prompt, turn)
    logprobs = _normalised(logits / (sampling.temperature or 1.0))
    return _normalised(_kept(logprobs, sampling)) if sampling.shaped else logprobs


def _penalised(
    logits: Reals, sampling: Sampling, prompt: NDArray[np.int32], turn: Sequence[int]
) -> Reals:
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    seen = np.unique(np.concatenate([prompt, np.array(turn, np.int32)]))
    factor = sampling.repetition_penalty
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    times = np.bincount(np.array(turn, np.int64), minlength=logits.size)
    return logits - sampling.frequency_penalty * times - sampling.presence_penalty * np.sign(times)


def _kept(logprobs: Reals, sampling: Sampling) -> Reals:
    """-inf in place of what min_p, top_k and top_p leave out, in this order."""
    if sampling.min_p > 0:
        least = logprobs.max() + np.log(sampling.min_p)
        logprobs = np.where(logprobs >= least, logprobs, -np.inf)
    if 0 < sampling.top_k < logprobs.size:
        least = np.sort(logprobs)[-sampling.top_k]
        logprobs = np.where(logprobs >= least, logprobs, -np.inf)
    if sampling.top_p < 1:
        order = np.argsort(-logprobs, kind="stable")
        probabilities = np.exp(_normalised(logprobs)[order])
        before = probabilities.cumsum() - probabilities
        out = order[1:][before[1:] >= sampling.top_p]
        logprobs = logprobs.copy()
        logprobs[out] = -np.inf
    return logprobs


def _normalised(logits: Reals) -> Reals:
    logits = logits - logits.max()
    return logits - np.log(np.exp(logits).sum())
