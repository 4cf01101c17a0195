"""Correction plugins (`treadle.corrections`), one file each: sampler and trainer differ.

An engine samples with other kernels and with older parameters than the trainer computes with. A
correction compares the trainer's log-probability of each token, before the step, with the recorded
one.

Shapes: T = predicted tokens, R = as many, or the segments.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """What a correction says of the tokens of a micro-batch; nothing has a gradient."""

    coefficients: Tensor
    """What the loss of a token is multiplied with, [T]: the ratio, bounded; 0 off the mask."""
    statistic: Tensor
    """What was compared with the bounds, of each token or each segment, [R]."""
    rejected: Tensor
    """bool, [R]: it lies outside them."""
    rejected_tokens: Tensor
    """bool, [T]: it, or its segment, lies outside; off the mask False."""


class Correction(Protocol):
    """Compares what the trainer computes with what was recorded. Plugins are frozen dataclasses."""

    @property
    def rejects(self) -> bool:
        """What lies outside the bounds is left out, and not merely weighed less."""
        ...

    def __call__(
        self, proximal_T: Tensor, recorded_T: Tensor, mask_T: Tensor, segments_T: Tensor
    ) -> Corrected:
        """Takes log-probabilities of the trainer and of the sampler, and numbers of segments.

        Rejection changes no denominator. A NaN on the mask counts as no difference.
        """
        ...
