"""Correction plugin `icepop`: tokens whose ratio is too small or too large are left out.

Coefficient w_t if low <= w_t <= high, else 0; "Every Step Evolves: Scaling Reinforcement Learning
for Trillion-Scale Thinking Model" (arXiv 2510.18855). Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from treadle_trainer.core.corrections import Corrected
from treadle_trainer.core.corrections.gated import Gated


@dataclass(frozen=True, slots=True)
class IcePop:
    """Correction plugin `icepop`. Its fields are its configuration."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        """Refuses what `gated` refuses."""
        self._gated()

    @property
    def rejects(self) -> bool:
        return True

    def __call__(
        self, proximal_T: Tensor, recorded_T: Tensor, mask_T: Tensor, segments_T: Tensor
    ) -> Corrected:
        return self._gated()(proximal_T, recorded_T, mask_T, segments_T)

    def _gated(self) -> Gated:
        return Gated(level="token", mode="mask", low=self.low, high=self.high)
