"""Filter plugin `zero_variance`: drops groups whose rewards do not differ."""

from collections.abc import Sequence

from treadle_experience.core.state import Result


class ZeroVariance:
    """Keeps a group with at least two different rewards: no other has an advantage."""

    def __call__(self, members: Sequence[Result]) -> str:
        """Drops by the rewards that are there."""
        rewards = {result.reward for result in members if result.reward is not None}
        if not rewards:
            return "no_reward"
        return "" if len(rewards) > 1 else "zero_variance"
