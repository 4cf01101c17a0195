"""A backend that some of what the scripted engine says makes choke."""

import numpy as np
from torch import Tensor

from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.core.packing import MicroBatch

BAD = (9, 9)
"""Tokens in a row; whatever holds them has no finite log-probability."""


class Poisoned(SingleBackend):
    """Backend `single`, but for what it cannot digest."""

    def logprobs(self, microbatch: MicroBatch) -> tuple[Tensor, Tensor]:
        logprobs, entropy = super().logprobs(microbatch)
        pairs = np.lib.stride_tricks.sliding_window_view(microbatch.token_ids, 2)
        if (pairs == BAD).all(1).any():
            logprobs = logprobs * float("nan")
        return logprobs, entropy
