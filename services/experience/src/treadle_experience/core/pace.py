"""The adaptive window: the smallest lag that keeps the trainer fed.

A step of lag that hides no wait makes samples older for nothing, and a wait that lag could have
hidden is lost time. So each step that the trainer waited widens the window by a step, as far as a
full window would have hidden it, and each step that it trained narrows the window by `BEARABLE`.
What it waits for want of lag is therefore at most `BEARABLE` of the steps that it trains, and
`max_lag + 1` steps more over a whole run. A fold of recorded facts: no clock, no random number,
the same after a restart. The bound of `max_lag` is another rule, and always holds.
"""

import math
from collections.abc import Mapping

BEARABLE = 0.02
"""Share of its training that the trainer may wait for batches that more lag would have brought."""


def after_step(aim: float, step: int, metrics: Mapping[str, float], max_lag: int) -> float:
    """The lag to aim at, in steps, after `step` was reported with its `wait_s` and `train_s`.

    From 0 to less than `max_lag + 1`: an aim beyond `max_lag` tells how long the window stays full.
    A report without these metrics changes nothing.
    """
    waited_s, trained_s = metrics.get("wait_s", 0.0), metrics.get("train_s", 0.0)
    if trained_s <= 0:
        return aim
    # How many steps sooner a full window opens the last task of this step: the first ones have no
    # step before them, and one task that is opened late holds up its whole batch.
    sooner = max(0, min(max_lag, step - 1) - math.floor(aim))
    return max(0.0, aim + min(waited_s / trained_s, sooner) - BEARABLE)
