"""The rules that a run's decisions follow, as values."""

from dataclasses import dataclass

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling

FIXED = ("tasks_per_step", "group_size", "max_lag")
"""Rules that a run keeps from its first start to its end: what is recorded relies on them."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Held-out tasks that are scored together."""

    name: str
    limit: int
    """Most tasks to take from the source, from its first."""
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class EvaluationRules:
    """When to evaluate, and at whose cost."""

    every: int
    """Steps between evaluations; step 0 and the last step are always scored."""
    share: float
    """Part of a replica's slots, in (0, 1]."""
    sets: tuple[EvaluationSet, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """How the ledger of one run decides."""

    run_id: str
    steps: int
    """The last step, unless the tasks end before."""
    tasks_per_step: int
    group_size: int
    """Episodes of a training task."""
    max_lag: int
    """Most steps between the policy that sampled a token and the one that trains on it."""
    retries: int
    """Failed or expired attempts of an episode that are issued again."""
    deadline_s: float
    lease_s: float
    sampling: Sampling
    drop_last: bool = False
    """Evict the tasks that cannot fill the last batch, instead of training on them."""
    evaluation: EvaluationRules | None = None

    @property
    def bound(self) -> int:
        """Tasks that may be ahead of a token's task, less one step's worth: the window's size."""
        return (self.max_lag + 1) * self.tasks_per_step

    def fixed(self) -> dict[str, int]:
        """The rules that a run cannot change."""
        return {name: getattr(self, name) for name in FIXED}

    def check_unchanged(self, settings: dict[str, int]) -> None:
        """Raises InvalidFieldError naming the first rule that differs from the run's start."""
        for name, value in self.fixed().items():
            if settings.get(name) != value:
                raise InvalidFieldError(
                    name, limit=f"{settings.get(name)} as the run began with", value=value
                )
