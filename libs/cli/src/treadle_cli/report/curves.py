"""Which curves a report draws, and how they follow from rows of metrics. Pure."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from treadle_cli.report.charts import Chart, Point, Series
from treadle_cli.rows import Row

Rows = Sequence[tuple[str, Row]]
"""Rows with their writers, in the order of their time."""

SERVICES = ("trainer", "rollout", "experience", "refit")
PAUSE_S = 60.0
"""A run that wrote nothing for longer was not running."""
WINDOWS = 24
"""Into how many windows of time a run is cut."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A while in a service's life, and how much of something fell into it."""

    end: float
    """Seconds of running time."""
    seconds: float
    amount: float


def of(rows: Rows, writer: str, name: str) -> list[Row]:
    """Rows of one kind, in order."""
    return [row for by, row in rows if (by, row["name"]) == (writer, name)]


def steps(rows: Rows) -> list[Row]:
    """Row `step` of each step, ascending; of one that was trained again, the later row."""
    by_step = {row["step"]: row for row in of(rows, "trainer", "step")}
    return [by_step[step] for step in sorted(by_step)]


def running_time(rows: Rows) -> Callable[[float], float]:
    """Maps Unix seconds to seconds for which the run was running, from its first row."""
    times = [row["time"] for _, row in rows]
    if not times:
        return lambda time: 0.0
    pauses = [(b, b - a) for a, b in pairwise(times) if b - a > PAUSE_S]
    ends = [end for end, _ in pauses]

    def passed(time: float) -> float:
        return time - times[0] - sum(length for _, length in pauses[: bisect_right(ends, time)])

    return passed


def curves(rows: Rows) -> list[Chart]:
    """All charts of a report."""
    return [*learning(rows), *speed(rows)]


def learning(rows: Rows) -> list[Chart]:
    """How the policy did and moved, by step."""
    trained = steps(rows)
    return [
        Chart(
            "Reward",
            "mean over the episodes of a step; held-out scores with their standard error",
            "step",
            [Series("trained on", _by_step(trained, "reward"), 0), *_scores(rows)],
            wide=True,
        ),
        Chart(
            "Lag",
            "steps from the oldest version of an episode to its training",
            "step",
            [
                Series("mean", _by_step(trained, "lag_mean"), 0),
                Series("largest", _by_step(trained, "lag_max"), 1),
            ],
        ),
        _of_one("KL divergence", "nats, from the policy that sampled (k3)", trained, "kl"),
        _of_one("Clip fraction", "share of trained tokens", trained, "clip_fraction"),
        _of_one("Entropy", "nats, at trained tokens", trained, "entropy"),
    ]


def speed(rows: Rows) -> list[Chart]:
    """How the services worked together."""
    passed = running_time(rows)
    total = passed(rows[-1][1]["time"]) if rows else 0.0
    unit, seconds = next(
        (each for each in (("hours", 3600.0), ("minutes", 60.0)) if total > 3 * each[1]),
        ("seconds", 1.0),
    )
    x_label = f"{unit} of running time"

    def by_time(found: Sequence[Interval], scale: float = 1.0) -> list[Point]:
        return [(x / seconds, scale * y) for x, y in windows(found, total)]

    idle = {service: list(_IDLE[service](rows, passed)) for service in SERVICES}
    return [
        Chart(
            "Idle share",
            "percent of a service's time; in bold, of the whole run",
            x_label,
            [
                Series(name, by_time(found, 100), style, summary=_share(found))
                for style, (name, found) in enumerate(idle.items())
            ],
            top=100,
            wide=True,
        ),
        Chart(
            "Throughput",
            "tokens/s; trained ones count prompts and observations",
            x_label,
            [
                Series("trained", by_time(list(_trained(rows, passed))), 0),
                Series("sampled", by_time(list(_sampled(rows, passed))), 1),
            ],
        ),
        _refits(rows),
    ]


def windows(found: Sequence[Interval], total_s: float) -> list[Point]:
    """Amount per second in each of WINDOWS windows that an interval ends in, at its middle."""
    length = total_s / WINDOWS or 1.0
    sums: dict[int, tuple[float, float]] = {}
    for each in found:
        window = min(int(each.end / length), WINDOWS - 1)
        seconds, amount = sums.get(window, (0.0, 0.0))
        sums[window] = (seconds + each.seconds, amount + each.amount)
    return [
        ((window + 0.5) * length, amount / seconds)
        for window, (seconds, amount) in sorted(sums.items())
        if seconds > 0
    ]


def _of_one(title: str, y_label: str, trained: Iterable[Row], key: str) -> Chart:
    return Chart(title, y_label, "step", [Series(title, _by_step(trained, key), 0)])


def _by_step(rows: Iterable[Row], key: str, scale: float = 1.0) -> list[Point]:
    return [(row["step"], scale * row[key]) for row in rows if key in row]


def _scores(rows: Rows) -> Iterator[Series]:
    scored = of(rows, "experience", "evaluation")
    for style, name in enumerate(dict.fromkeys(row["evaluation"] for row in scored), start=1):
        by_step = {row["step"]: row for row in scored if row["evaluation"] == name}
        found = [by_step[step] for step in sorted(by_step) if "score" in by_step[step]]
        errors = [row.get("std_error", 0.0) for row in found]
        points = _by_step(found, "score")
        yield Series(f"held-out {name}", points, style, dots=True, errors=errors)


def _refits(rows: Rows) -> Chart:
    """Of a version that was published twice at one step, the later one counts."""
    committed = of(rows, "refit", "version")
    step_of = {row["version"]: row["step"] for row in committed}
    served = [
        row | {"step": step_of[row["version"]]}
        for row in of(rows, "rollout", "version")
        if row["version"] in step_of
    ]
    return Chart(
        "Refit",
        "milliseconds for each version; engines sample on but for the pause",
        "step",
        [
            Series("announced to committed", _latest(committed, "total_s"), 0),
            Series("loaded by an engine", _latest(served, "load_s"), 1),
            Series("pause to install", _latest(served, "install_s"), 2),
        ],
    )


def _latest(rows: Iterable[Row], key: str) -> list[Point]:
    return sorted(dict(_by_step(rows, key, 1e3)).items())


def _share(found: Sequence[Interval]) -> str:
    seconds = sum(each.seconds for each in found)
    return f"{sum(each.amount for each in found) / seconds:.0%}" if seconds else ""


Passed = Callable[[float], float]


def _trainer_idle(rows: Rows, passed: Passed) -> Iterator[Interval]:
    """It waits for a batch."""
    for row in of(rows, "trainer", "step"):
        seconds = _step_s(row)
        yield Interval(passed(row["time"]), seconds, min(row["wait_s"], seconds))


def _rollout_idle(rows: Rows, passed: Passed) -> Iterator[Interval]:
    """A slot is free and no ticket is to be had."""
    return _grown(of(rows, "rollout", "rollout"), "waited_s", passed)


def _experience_idle(rows: Rows, passed: Passed) -> Iterator[Interval]:
    """Its writer has nothing to append."""
    counts = [row for row in of(rows, "experience", "counts") if "append_s" in row]
    for each in _grown(counts, "append_s", passed):
        yield Interval(each.end, each.seconds, each.seconds - min(each.amount, each.seconds))


def _refit_idle(rows: Rows, passed: Passed) -> Iterator[Interval]:
    """No version is on its way."""
    for before, row in pairwise(of(rows, "refit", "version")):
        seconds = passed(row["time"]) - passed(before["time"])
        yield Interval(passed(row["time"]), seconds, max(seconds - row["total_s"], 0.0))


_IDLE = {
    "trainer": _trainer_idle,
    "rollout": _rollout_idle,
    "experience": _experience_idle,
    "refit": _refit_idle,
}


def _trained(rows: Rows, passed: Passed) -> Iterator[Interval]:
    for row in of(rows, "trainer", "step"):
        yield Interval(passed(row["time"]), _step_s(row), row["tokens"])


def _sampled(rows: Rows, passed: Passed) -> Iterator[Interval]:
    return _grown(of(rows, "rollout", "rollout"), "sampled_tokens", passed)


def _step_s(row: Row) -> float:
    """The whole step: `tokens_per_s` is over all of it."""
    return row["tokens"] / row["tokens_per_s"] if row["tokens_per_s"] else row["wait_s"]


def _grown(rows: Iterable[Row], key: str, passed: Passed) -> Iterator[Interval]:
    """What a count grew by from row to row of one process; `up_s` falls where another begins."""
    for before, row in pairwise(rows):
        again = row["up_s"] < before["up_s"]
        seconds = row["up_s"] - (0.0 if again else before["up_s"])
        amount = row[key] - (0 if again else before[key])
        yield Interval(passed(row["time"]), seconds, amount)
