"""On-policy distillation: at each token, how much less the teacher thinks of it than the student.

A_t = -coefficient kl_t with kl_t = log p_student - log p_teacher (k1), an estimate of the reverse
KL divergence; rewards play no part. "On-Policy Distillation of Language Models" (arXiv 2306.13649),
with the policy gradient of "MiniLLM" (arXiv 2306.08543). No plugin: there is no teacher yet.
Shapes: S = segments, T = places.
"""

import numpy as np
from numpy.typing import NDArray


def on_policy_distill(
    kl_ST: NDArray[np.floating], mask_ST: NDArray[np.bool_], *, coefficient: float = 1.0
) -> NDArray[np.floating]:
    """Advantages, [S, T]; 0 off the mask."""
    return -kl_ST.dtype.type(coefficient) * np.where(mask_ST, kl_ST, 0)
