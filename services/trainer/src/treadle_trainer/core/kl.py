"""How far a policy is from a reference, estimated at sampled tokens, and what it costs.

With d = log p - log p_ref: k1 = d, k2 = d^2 / 2, k3 = e^-d - 1 + d where the policy sampled, and
e^d - 1 - d where the reference did; "Approximating KL Divergence" (2020). k2 and k3 are
clamped to ± 10, without gradient beyond. The adaptive coefficient is that of "Fine-Tuning Language
Models from Human Preferences" (arXiv 1909.08593), 2.2.
Shapes: T = predicted tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.log_ratios import finite

Estimator = Literal["k1", "k2", "k3"]
Reference = Literal["model", "rollout"]
"""A frozen model, or the policy that sampled the tokens, as recorded."""

MAX_KL = 10.0
MAX_CHANGE = 0.2
"""Most that the error of a divergence counts for in one change of an adaptive coefficient."""


@dataclass(frozen=True, slots=True)
class Kl:
    """A divergence in the loss, or in the reward."""

    coefficient: float
    """What it is multiplied with."""
    estimator: Estimator = "k3"
    reference: Reference = "rollout"
    as_loss: bool = True
    """A term of the loss, with gradient; else a part of the reward, without."""

    def __post_init__(self) -> None:
        """Refuses k1 as a loss with the sampler as reference."""
        if not 0 <= self.coefficient < float("inf"):
            raise InvalidFieldError("coefficient", limit="finite and >= 0", value=self.coefficient)
        if self.as_loss and self.reference == "rollout" and self.estimator == "k1":
            limit = "k2 or k3 as a loss with reference rollout: k1 would push the policy away"
            raise InvalidFieldError("estimator", limit=limit, value=self.estimator)

    def __call__(self, logprobs_T: Tensor, reference_T: Tensor, mask_T: Tensor) -> Tensor:
        """The estimate at each token, in nats, [T]; 0 off the mask."""
        # Not clamped: k1 is a difference, and its size is what is asked for.
        d_T = finite(torch.where(mask_T, logprobs_T - reference_T, 0.0))
        if self.estimator == "k1":
            return d_T
        if self.estimator == "k2":
            found_T = d_T**2 / 2
        else:
            toward_T = d_T if self.reference == "rollout" else -d_T
            found_T = toward_T.clamp(max=MAX_EXPONENT).exp() - 1 - toward_T
        return found_T.clamp(-MAX_KL, MAX_KL)


MAX_EXPONENT = 30.0
"""Keeps k3 finite before it is clamped, so that no infinity meets a gradient of 0."""


def next_coefficient(
    coefficient: float, observed: float, *, target: float, horizon: float, num_samples: int
) -> float:
    """An adaptive coefficient after a step of `num_samples` episodes, at divergence `observed`.

    It is multiplied with 1 + e num_samples / horizon, e = clip(observed / target - 1, ± 0.2).
    """
    error = min(max(observed / target - 1, -MAX_CHANGE), MAX_CHANGE)
    return coefficient * (1 + error * num_samples / horizon)
