"""Arrays of golden cases: rows of one length, where a micro-batch has tokens end to end.

Shapes: B = rows, T = places of a row, N = B * T.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Case = dict[str, Any]


@dataclass(frozen=True)
class Arrays:
    """Of one precision, "fp32" or "fp64"."""

    precision: str

    def array(self, values: Any) -> Any:
        return np.array(values, np.float32 if self.precision == "fp32" else np.float64)

    def tensor(self, values: Any) -> torch.Tensor:
        return torch.tensor(
            values, dtype=torch.float32 if self.precision == "fp32" else torch.float64
        )

    def flat(self, rows: Any) -> torch.Tensor:
        """[B, T] as [N]; the last axis of a head stays."""
        return self.tensor(rows).flatten(0, 1)


def laid(flat: torch.Tensor, rows: int) -> Any:
    """[N] as [B, T]."""
    return flat.detach().unflatten(0, (rows, -1)).tolist()


def segments_of(inputs: Case) -> torch.Tensor:
    """Number of the row of each place, [N]."""
    mask = torch.tensor(inputs["action_mask"])
    return torch.arange(len(mask)).repeat_interleave(mask.shape[1])
