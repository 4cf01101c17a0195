"""The adaptive window: the smallest lag that keeps the trainer fed.

A step of lag that hides no wait makes samples older for nothing, and a wait that lag could have
hidden is lost time. So a wait widens the window by a step at once, and is a debt: the window
narrows, a step at a time, only once the trainer has since trained so long that all that it waited
is a small share. A fold of recorded facts: no clock, no random number, the same after a restart.
The bound of `max_lag` is another rule, and always holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass

NOTICED = 0.02
"""A wait below this share of the step's training is no wait."""

BEARABLE = 0.01
"""Share of its time that the trainer may have waited for the window to narrow."""

SPELL = 8
"""Fewest steps between two times that the window narrows."""

LONGEST_DEBT = 80
"""Most steps of training that one has to see after a wait before the window narrows."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the window aims at, and what was seen since it last narrowed."""

    lag: int = 0
    """Lag that admission aims at, in steps."""
    steps: int = 0
    """Steps since it last changed."""
    wait_s: float = 0.0
    """Seconds that the trainer waited for batches, since the window last narrowed."""
    train_s: float = 0.0
    """Seconds that it trained meanwhile."""


def after_step(pace: Pace, metrics: Mapping[str, float], max_lag: int) -> Pace:
    """The pace after a step was reported with `metrics`, of which `wait_s` and `train_s` count.

    A report without them changes nothing.
    """
    waited_s, trained_s = metrics.get("wait_s", 0.0), metrics.get("train_s", 0.0)
    if trained_s <= 0:
        return pace
    train_s = pace.train_s + trained_s
    # Without a limit, a run that nothing could feed for a day would stay wide for a year.
    wait_s = min(pace.wait_s + waited_s, BEARABLE * (train_s + LONGEST_DEBT * trained_s))
    if waited_s > NOTICED * trained_s:
        return Pace(min(max_lag, pace.lag + 1), 0, wait_s, train_s)
    if pace.lag and pace.steps + 1 >= SPELL and wait_s <= BEARABLE * train_s:
        return Pace(pace.lag - 1)
    return Pace(pace.lag, pace.steps + 1, wait_s, train_s)
