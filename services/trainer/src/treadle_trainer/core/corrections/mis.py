"""Correction plugin `mis`: segments whose ratios are off on the whole are left out.

Coefficient w_t if low <= exp(mean of log w over the segment) <= high, else 0 for all of it; "When
Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch" (2025).
Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from treadle_trainer.core.corrections import Corrected
from treadle_trainer.core.corrections.gated import Gated


@dataclass(frozen=True, slots=True)
class Mis:
    """Correction plugin `mis`. Its fields are its configuration."""

    low: float = 0.99
    high: float = 1.01

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
        return Gated(level="geo", mode="mask", low=self.low, high=self.high)
