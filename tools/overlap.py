"""What asynchrony gains: the calculator's run with a slow tool, as it is and strictly on-policy.

    python tools/overlap.py [--rounds 2] [--steps 60] [--latency-s 0.02]

The two arms take turns on the four services: the recipe's `max_lag`, and `max_lag: 0`. Both do as
many steps on tasks of the same draw, and both must learn: each final score has its bound. Seconds
run from the first batch after the baseline to the last step.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from treadle_cli.rows import written
from treadle_runtime.measures import Measure, report

ROOT = Path(__file__).parent.parent
ARMS = {"async": 4, "sync": 0}
"""Their `max_lag`."""
SCORES = {"greedy": 0.93, "sampled": 0.85}
"""Held-out sets, and what a policy that learned reaches on them."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run, measured."""

    seconds: float
    idle: float
    """Share of them that the trainer waited for a batch."""
    lag: float
    scores: dict[str, float]


def main() -> int:
    """Runs both arms in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--latency-s", type=float, default=0.02)
    options = parser.parse_args()
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for round_ in range(options.rounds):
        for arm in sorted(ARMS, reverse=bool(round_ % 2)):
            runs[arm].append(_run(arm, options))
            sys.stderr.write(f"{arm}: {runs[arm][-1]}\n")
    return report(_measures(runs))


def _measures(runs: dict[str, list[Run]]) -> Iterator[Measure]:
    seconds = {arm: [round(run.seconds, 2) for run in runs[arm]] for arm in runs}
    medians = {arm: statistics.median(values) for arm, values in seconds.items()}
    ratio = medians["sync"] / medians["async"]
    details = {"seconds": seconds, "load1": os.getloadavg()[0]}
    yield Measure("async_over_sync", ratio, "ratio", ">= 1.3", details)
    for arm, done in runs.items():
        for name, bound in SCORES.items():
            worst = min(run.scores[name] for run in done)
            yield Measure(f"{arm}_heldout_{name}", worst, "share", f">= {bound}")
        yield Measure(f"{arm}_lag", statistics.fmean(run.lag for run in done), "steps")
        prefix = "" if arm == "async" else f"{arm}_"
        yield Measure(f"{prefix}trainer_idle", statistics.median(r.idle for r in done), "share")


def _run(arm: str, options: argparse.Namespace) -> Run:
    with tempfile.TemporaryDirectory(prefix="treadle") as directory:
        agent = (
            f'{{name: "examples/calculator/env.py:CalculatorEnv", latency_s: {options.latency_s}}}'
        )
        subprocess.run(  # noqa: S603
            [
                *(sys.executable, "-m", "treadle_cli.main", "train", "recipes/calculator.yaml"),
                f"run.dir={directory}/run",
                "run.model=examples/calculator/policy",
                f"rollout.agent={agent}",
                f"experience.steps={options.steps}",
                f"experience.max_lag={ARMS[arm]}",
            ],
            check=True,
            cwd=ROOT,
            stdout=sys.stderr,
        )
        return _measured(Path(directory) / "run")


def _measured(directory: Path) -> Run:
    steps = written(directory, "trainer", "step")
    first = steps[0]
    # The wait of the first step spans the scoring of the baseline, in either arm.
    claimed = first["time"] - first["publish_s"] - first["train_s"]
    seconds = steps[-1]["time"] - claimed
    scored = written(directory, "experience", "evaluation")
    return Run(
        seconds,
        sum(step["wait_s"] for step in steps[1:]) / seconds,
        statistics.fmean(step["lag_mean"] for step in steps),
        {row["evaluation"]: row["score"] for row in scored},
    )


if __name__ == "__main__":
    raise SystemExit(main())
