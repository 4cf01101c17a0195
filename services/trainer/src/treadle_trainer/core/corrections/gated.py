"""Correction plugin `gated`: any level, mode and gate, of which the others are named choices.

With l_t = log p_trainer - log p_sampler and w_t = exp(l_t), the coefficient of a token is w_t,
unless what the gate measures at the level lies outside [low, high]: mode `mask` makes it 0, `clip`
moves it to the nearer bound, `trunc` down to `high`.
Truncation: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025); masks:
IcePop (arXiv 2510.18855), "Trust Region Masking" (arXiv 2512.23075).
Shapes: T = predicted tokens.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from treadle_core.errors import InvalidFieldError
from treadle_trainer.core.corrections import Corrected
from treadle_trainer.core.log_ratios import (
    MAX_LOG_RATIO,
    log_ratio,
    segment_mean,
    segment_sum,
)

LEAST_PROBABILITY = 1e-6
"""Probabilities keep this distance from 0 and 1 in a binary divergence."""


@dataclass(frozen=True, slots=True)
class Gated:
    """Correction plugin `gated`. Its fields are its configuration."""

    level: Literal["off", "token", "seq", "geo"] = "token"
    """`token`: each by itself. `seq`: a segment by its product of ratios, or by its mean
    divergence. `geo`: a segment by its geometric mean of ratios. `off`: every coefficient is 1."""
    mode: Literal["mask", "clip", "trunc"] = "mask"
    gate: Literal["ratio", "binary_kl", "tv"] = "ratio"
    """`ratio`: w. `binary_kl` and `tv`: divergence between the events that the token is sampled,
    q log(q/p) + (1-q) log((1-q)/(1-p)) and |q - p|, with q the sampler's probability."""
    low: float | None = None
    """Inclusive; None for no bound. A divergence has none."""
    high: float | None = 5.0
    """Inclusive; None for no bound."""

    def __post_init__(self) -> None:
        """Refuses what would be silently meaningless."""
        if self.level != "token" and self.mode != "mask" and self.level != "off":
            limit = "mask at level seq or geo: a ratio of a segment is no weight of a token"
            raise InvalidFieldError("mode", limit=limit, value=self.mode)
        if self.gate != "ratio":
            self._check_divergence()
        if self.mode == "clip" and self.low is None:
            raise InvalidFieldError("low", limit="a number with mode clip", value=None)
        if self.mode != "mask" and self.high is None:
            raise InvalidFieldError("high", limit=f"a number with mode {self.mode}", value=None)
        if self.mode == "trunc" and self.low is not None:
            raise InvalidFieldError("low", limit="none with mode trunc", value=self.low)
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        if any(not bound > 0 for bound in bounds) or bounds != sorted(bounds):
            raise InvalidFieldError("low", limit="0 < low <= high", value=bounds)

    def _check_divergence(self) -> None:
        if self.level == "geo":
            limit = "ratio at level geo: a divergence has no geometric mean here"
            raise InvalidFieldError("gate", limit=limit, value=self.gate)
        if self.mode != "mask":
            limit = f"mask with gate {self.gate}: a divergence is no weight"
            raise InvalidFieldError("mode", limit=limit, value=self.mode)
        if self.low is not None or self.high is None:
            limit = f"none, and a number for high, with gate {self.gate}"
            raise InvalidFieldError("low", limit=limit, value=self.low)

    @property
    def rejects(self) -> bool:
        return self.mode == "mask" and self.level != "off"

    @torch.no_grad()
    def __call__(
        self, proximal_T: Tensor, recorded_T: Tensor, mask_T: Tensor, segments_T: Tensor
    ) -> Corrected:
        log_ratio_T = log_ratio(proximal_T, recorded_T, mask_T)
        ratio_T = torch.where(mask_T, log_ratio_T.exp(), 0.0)
        if self.level == "off":
            none_T = torch.zeros_like(mask_T)
            return Corrected(mask_T.to(ratio_T.dtype), ratio_T, none_T, none_T)
        if self.gate == "ratio":
            statistic = self._ratio(log_ratio_T, mask_T, segments_T)
        else:
            gates = {"binary_kl": _binary_kl, "tv": _total_variation}
            divergence_T = gates[self.gate](proximal_T, recorded_T, mask_T)
            at_token = self.level == "token"
            statistic = divergence_T if at_token else segment_mean(divergence_T, mask_T, segments_T)
        rejected = torch.zeros_like(statistic, dtype=torch.bool)
        if self.low is not None:
            rejected |= statistic < self.low
        if self.high is not None:
            rejected |= statistic > self.high
        rejected_T = mask_T & (rejected if self.level == "token" else rejected[segments_T])
        rejected = rejected_T if self.level == "token" else rejected
        return Corrected(self._coefficients(ratio_T, rejected_T), statistic, rejected, rejected_T)

    def _ratio(self, log_ratio_T: Tensor, mask_T: Tensor, segments_T: Tensor) -> Tensor:
        if self.level == "token":
            return torch.where(mask_T, log_ratio_T.exp(), 0.0)
        reduce = segment_sum if self.level == "seq" else segment_mean
        found = reduce(log_ratio_T, mask_T, segments_T)
        return found.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def _coefficients(self, ratio_T: Tensor, rejected_T: Tensor) -> Tensor:
        if self.mode == "mask":
            return torch.where(rejected_T, 0.0, ratio_T)
        bounded_T = ratio_T.clamp(self.low, self.high)
        return torch.where(rejected_T, bounded_T, ratio_T)


def _binary_kl(proximal_T: Tensor, recorded_T: Tensor, mask_T: Tensor) -> Tensor:
    q_T, p_T = _probabilities(recorded_T, proximal_T, mask_T)
    q_T = q_T.clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    p_T = p_T.clamp(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    found_T = q_T * (q_T / p_T).log() + (1 - q_T) * ((1 - q_T) / (1 - p_T)).log()
    return torch.where(mask_T, found_T, 0.0)


def _total_variation(proximal_T: Tensor, recorded_T: Tensor, mask_T: Tensor) -> Tensor:
    q_T, p_T = _probabilities(recorded_T, proximal_T, mask_T)
    return torch.where(mask_T, (q_T - p_T).abs(), 0.0)


def _probabilities(recorded_T: Tensor, proximal_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Both probabilities; both 1 off the mask, and where one is NaN."""
    known_T = mask_T & ~(recorded_T - proximal_T).isnan()
    return torch.where(known_T, recorded_T, 0.0).exp(), torch.where(known_T, proximal_T, 0.0).exp()
