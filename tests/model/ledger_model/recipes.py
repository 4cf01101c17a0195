"""Random recipes: rules and filters of a run, and what they promise."""

from random import Random
from typing import Any

from ledger_model.calls import happens
from ledger_model.oracle import Bounds
from treadle_core.tickets import Sampling
from treadle_experience.core.filters import Filter
from treadle_experience.core.filters.reward_range import RewardRange
from treadle_experience.core.filters.zero_variance import ZeroVariance
from treadle_experience.core.rules import EvaluationRules, EvaluationSet, Overdue, Rules


def rules_of(random: Random, size: int) -> Rules:
    """Rules of a run that about `size` actions can bring far."""
    evaluated = happens(random, 0.4)
    values: dict[str, Any] = {
        "run_id": "model",
        "steps": max(1, size // random.choice((10, 20, 40))),
        "tasks_per_step": random.randint(1, 3),
        "group_size": random.randint(1, 3),
        "min_episodes": None,
        "overdue": Overdue.WAIT,
        "adaptive": happens(random, 0.3),
        "max_lag": random.randint(0, 3),
        "retries": random.choice((0, 1, 2, 5)),
        "deadline_s": 60.0,
        "lease_s": 10.0,
        "sampling": Sampling(1.0, 16),
        "drop_last": happens(random, 0.5),
        "payload_budget_bytes": random.choice((None, None, 1, 20_000)),
        "evaluation": _evaluation(random) if evaluated else None,
        "kept_tasks": random.choice((0, 1, 5, 1000)),
        "condense_after": random.choice((1, 1, 30, 1000)),
    }
    if happens(random, 0.3):
        values["min_episodes"] = random.randint(1, values["group_size"])
    if happens(random, 0.4):
        values["overdue"] = random.choice((Overdue.LATE, Overdue.EVICT))
    if values["overdue"] is Overdue.LATE:
        values["max_overdue_lag"] = values["max_lag"] + random.randint(0, 3)
    return Rules(**values)


def bounds_of(rules: Rules) -> Bounds:
    """What these rules promise."""
    return Bounds(
        max_lag=rules.max_overdue_lag or rules.max_lag,
        tasks_per_step=rules.tasks_per_step,
        group_size=rules.group_size,
        smallest_group=rules.min_episodes or rules.group_size,
        drops_last=rules.drop_last,
        payload_budget_bytes=rules.payload_budget_bytes,
        in_order=rules.overdue is Overdue.WAIT,
    )


def filter_of(random: Random, rules: Rules) -> Filter | None:
    """None, or one that keeps enough for the run to go on."""
    choices = [None, RewardRange(-0.5, 0.75), RewardRange(0.25, 1.5)]
    return random.choice(choices if rules.enough == 1 else [*choices, ZeroVariance()])


def _evaluation(random: Random) -> EvaluationRules:
    exact = happens(random, 0.25)
    chosen = EvaluationSet("held-out", random.randint(1, 3), Sampling(0.0, 16), exact)
    return EvaluationRules(random.randint(1, 4), 0.4, (chosen,))
