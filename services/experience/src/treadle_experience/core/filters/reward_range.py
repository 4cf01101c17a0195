"""Filter plugin `reward_range`: drops groups that are too hard or too easy."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from treadle_core.errors import InvalidFieldError
from treadle_experience.core.state import Result


@dataclass(frozen=True, slots=True)
class RewardRange:
    """Filter plugin `reward_range`. Its fields are its configuration."""

    low: float
    """A kept group's mean reward is higher than this."""
    high: float
    """And lower than this."""

    def __post_init__(self) -> None:
        """Raises InvalidFieldError where nothing lies between the two."""
        if not self.low < self.high:
            raise InvalidFieldError(
                "filter.low", limit=f"less than high {self.high:g}", value=self.low
            )

    def __call__(self, members: Sequence[Result]) -> str:
        """Drops by the mean of the rewards that are there."""
        rewards = [result.reward for result in members if result.reward is not None]
        if not rewards:
            return "no_reward"
        mean = fmean(rewards)
        if mean <= self.low:
            return "reward_low"
        return "reward_high" if mean >= self.high else ""
