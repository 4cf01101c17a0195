"""The loss of a critic, whose value may move only so far in one step.

L = 1/2 mean over tokens of max((V - R)^2, (V_clip - R)^2), V_clip = V_old + clip(V - V_old, ±clip);
"Implementation Matters in Deep Policy Gradients" (arXiv 2005.12729). No plugin: there is no critic
yet. Shapes: T = predicted tokens.
"""

import torch
from torch import Tensor

from treadle_core.errors import InvalidFieldError


def clipped_value_loss(
    values_T: Tensor, old_T: Tensor, returns_T: Tensor, mask_T: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Loss of each token, [T], 0 off the mask; and bool, [T]: V lies outside the clip.

    `clip` None: V as it is. Raises InvalidFieldError where it is not above 0.
    """
    if clip is not None and not clip > 0:
        raise InvalidFieldError("clip", limit="> 0", value=clip)
    values_T, old_T, returns_T = (
        torch.where(mask_T, each, 0.0) for each in (values_T, old_T, returns_T)
    )
    error_T = (values_T - returns_T) ** 2
    if clip is None:
        return error_T / 2, torch.zeros_like(mask_T)
    change_T = values_T - old_T
    clipped_T = old_T + change_T.clamp(-clip, clip)
    losses_T = torch.maximum(error_T, (clipped_T - returns_T) ** 2) / 2
    return losses_T, mask_T & (change_T.abs() > clip)
