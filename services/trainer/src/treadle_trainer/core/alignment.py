"""From what an agent framework records to arrays on the axis of predictions.

Records name the tokens that a policy sampled by ranges. Place j of the axis predicts token j + 1,
so that the first token has no place, and a sequence of n tokens has n - 1.
Shapes: T = places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Unusable(StrEnum):
    """Why a recorded sequence cannot be trained on."""

    EMPTY_TOKENS = "empty_tokens"
    LOGPROB_MISALIGN = "logprob_misalign"
    """As many log-probabilities as tokens were expected."""
    NO_ACTION_TOKENS = "no_action_tokens"
    """No token that something predicts was sampled."""


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """A recorded sequence, at most `max_tokens` long."""

    actions: NDArray[np.bool_]
    """The token predicted here was sampled, [T]."""
    logprobs: NDArray[np.floating] | None
    """Its recorded log-probability, [T]; None where none were recorded."""
    num_tokens: int
    """T + 1."""
    clipped: bool
    """It reaches the most tokens there may be, and may be cut."""

    @property
    def num_actions(self) -> int:
        """Sampled tokens."""
        return int(self.actions.sum())


def align(
    num_tokens: int,
    action_ranges: Sequence[tuple[int, int]],
    logprobs: NDArray[np.floating] | None,
    *,
    max_tokens: int,
) -> Aligned | Unusable:
    """Shifts a sequence by one; ranges are half open, on the axis of tokens."""
    if not num_tokens:
        return Unusable.EMPTY_TOKENS
    if logprobs is not None and len(logprobs) != num_tokens:
        return Unusable.LOGPROB_MISALIGN
    sampled = np.zeros(num_tokens, np.bool_)
    for start, end in action_ranges:
        sampled[start:end] = True
    actions = sampled[1:max_tokens]
    if not actions.any():
        return Unusable.NO_ACTION_TOKENS
    kept = min(num_tokens, max_tokens)
    shifted = None if logprobs is None else logprobs[1:max_tokens]
    return Aligned(actions, shifted, kept, num_tokens >= max_tokens)
