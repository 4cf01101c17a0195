"""Correction plugin `tis`: truncated importance sampling, token by token.

Coefficient min(w_t, high); "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training" (2025). Shapes: T = predicted tokens.
"""

from dataclasses import dataclass

from torch import Tensor

from treadle_trainer.core.corrections import Corrected
from treadle_trainer.core.corrections.gated import Gated


@dataclass(frozen=True, slots=True)
class Tis:
    """Correction plugin `tis`. Its fields are its configuration."""

    high: float = 2.0
    """Largest coefficient."""

    def __post_init__(self) -> None:
        """Refuses what `gated` refuses."""
        self._gated()

    @property
    def rejects(self) -> bool:
        return False

    def __call__(
        self, proximal_T: Tensor, recorded_T: Tensor, mask_T: Tensor, segments_T: Tensor
    ) -> Corrected:
        return self._gated()(proximal_T, recorded_T, mask_T, segments_T)

    def _gated(self) -> Gated:
        return Gated(level="token", mode="trunc", high=self.high)
