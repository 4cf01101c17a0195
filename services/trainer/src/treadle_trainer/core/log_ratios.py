"""Logarithms of ratios of probabilities, made safe to exponentiate.

Shapes: T = predicted tokens.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 30.0
"""Log-ratios are clamped to ± this; beyond it there is no gradient."""


def log_ratio(logprobs_T: Tensor, other_T: Tensor, mask_T: Tensor) -> Tensor:
    """The logarithm of p / q, clamped; NaN becomes 0, and what lies off the mask is 0.

    A NaN after exp would still poison the gradient.
    """
    found_T = finite(torch.where(mask_T, logprobs_T - other_T, 0.0))
    return found_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def finite(log_ratio_T: Tensor) -> Tensor:
    """NaN becomes 0 and what is infinite ± 30; no gradient there."""
    return log_ratio_T.nan_to_num(0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO)


def segment_mean(values_T: Tensor, mask_T: Tensor, segments_T: Tensor) -> Tensor:
    """Mean over the mask of each segment, [number of segments]; 0 where it has no token.

    Segments are numbered from 0, ascending. Without gradient.
    """
    counts = segment_sum(torch.ones_like(values_T), mask_T, segments_T)
    return segment_sum(values_T, mask_T, segments_T) / counts.clamp(min=1)


def segment_sum(values_T: Tensor, mask_T: Tensor, segments_T: Tensor) -> Tensor:
    """Sum over the mask of each segment, [number of segments]; without gradient.

    In a fixed order, so that the same tokens give the same bits on a GPU, too.
    """
    masked_T = torch.where(mask_T, values_T, 0.0).detach()
    return torch.segment_reduce(masked_T, "sum", lengths=torch.bincount(segments_T), initial=0)
