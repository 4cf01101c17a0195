"""Advantage plugins (`treadle.advantages`), one file each."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Advantages:
    """What the episodes of one group weigh, n = episodes of the group."""

    values: NDArray[np.floating]
    """Advantage of each episode, [n]; 0 where it does not enter."""
    enters: NDArray[np.bool_]
    """The episode enters the loss and its denominator, [n]."""


class Advantage(Protocol):
    """Turns the rewards of one group into advantages. Plugins are frozen dataclasses."""

    def __call__(self, rewards: NDArray[np.floating]) -> Advantages:
        """Takes rewards [n], NaN where an episode has none; answers in their dtype."""
        ...
