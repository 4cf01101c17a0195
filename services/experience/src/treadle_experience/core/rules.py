"""The rules that a run's decisions follow, as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling

FIXED = ("tasks_per_step", "group_size", "max_lag")
"""Rules that a run keeps from its first start to its end: what is recorded relies on them."""


class Overdue(StrEnum):
    """What becomes of a task that still runs when a batch could be formed without it."""

    WAIT = "wait"
    """The batch waits for it."""
    LATE = "late"
    """It is passed over and trained when it is done, unless it lags too far by then."""
    EVICT = "evict"
    """It is evicted."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Held-out tasks that are scored together."""

    name: str
    limit: int
    """Most tasks to take from the source, from its first."""
    sampling: Sampling
    exact: bool = False
    """Only tokens of the parameters that are scored count."""


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
    min_episodes: int | None = None
    """Members that a task has to have after their retries; None: all of them."""
    overdue: Overdue = Overdue.WAIT
    max_overdue_lag: int | None = None
    """Most steps that a passed-over task may lag, >= `max_lag`; None unless overdue is `late`."""
    adaptive: bool = False
    """Aim at the smallest lag that keeps the trainer fed, instead of at `max_lag`."""
    payload_budget_bytes: int | None = None
    """Bytes of payloads that wait for a checkpoint, at most; None: no limit is watched."""
    drop_last: bool = False
    """Evict the tasks that cannot fill the last batch, instead of training on them."""
    evaluation: EvaluationRules | None = None
    kept_tasks: int = 2048
    """Tasks without further use whose records are kept; they are forgotten when twice as many."""
    keep_payloads: bool = False
    """Keep payloads that are consumed for as long as the records of their tasks."""
    condense_after: int = 50_000
    """Transitions of a journal that is condensed, unless its state has near as many records."""

    @property
    def bound(self) -> int:
        """Tasks that may be ahead of a token's task, less one step's worth: a full window."""
        return (self.max_lag + 1) * self.tasks_per_step

    @property
    def enough(self) -> int:
        """Members that a training task has to have."""
        return self.group_size if self.min_episodes is None else self.min_episodes

    @property
    def lag_limit(self) -> int:
        """Most steps that any trained token may lag."""
        return self.max_lag if self.max_overdue_lag is None else self.max_overdue_lag

    def window_size(self, aim: float) -> int:
        """Tasks of the window; `aim` is the lag that an adaptive one aims at, in steps."""
        aimed = int((aim + 1) * self.tasks_per_step)
        return min(self.bound, aimed) if self.adaptive else self.bound

    def fixed(self) -> dict[str, int]:
        """The rules that a run cannot change."""
        return {name: getattr(self, name) for name in FIXED}

    def check_unchanged(self, settings: Mapping[str, int]) -> None:
        """Raises InvalidFieldError naming the first rule that differs from the run's start."""
        for name, value in self.fixed().items():
            if settings.get(name) != value:
                raise InvalidFieldError(
                    name, limit=f"{settings.get(name)} as the run began with", value=value
                )
