"""The runs behind docs/learning.md and the demo's row in docs/benchmarks.md: seeds and lessons.

    python tools/learning.py run DATA.json [--at-once 1] [--seeds 3]
    python tools/learning.py draw DATA.json docs/learning.svg      needs matplotlib

`run` trains the calculator's policy on the four services, each run on two cores of its own, and
keeps of every step what is drawn. It prints the demo's scores over the seeds as measures.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from treadle_cli.rows import written
from treadle_runtime.measures import Measure, report

ROOT = Path(__file__).parent.parent
UNCORRECTED = 'trainer.loss={name: "examples/calculator/uncorrected.py:Uncorrected"}'
FAST = ("trainer.optimizer.learning_rate=1.0e-3",)
LAGGING = (*FAST, "experience.max_lag=10", "trainer.publish_every=10")
"""Parameters go to the engine every tenth step only: tokens are up to ten steps old."""
ARMS: dict[str, tuple[str, ...]] = {
    "demo": (),
    "no lag, no correction": (*FAST, "experience.max_lag=0", UNCORRECTED),
    "lag, no correction": (*LAGGING, UNCORRECTED),
    "lag, corrected": LAGGING,
}
KEPT = ("step", "reward", "entropy", "kl", "lag_mean")


def main() -> int:
    """Runs, or draws."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("data", type=Path)
    running.add_argument("--at-once", type=int, default=1)
    running.add_argument("--seeds", type=int, default=3)
    drawing = commands.add_parser("draw")
    drawing.add_argument("data", type=Path)
    drawing.add_argument("picture", type=Path)
    options = parser.parse_args()
    if options.command == "draw":
        draw(json.loads(options.data.read_text()), options.picture)
        return 0
    runs = run(options.at_once, options.seeds)
    options.data.write_text(json.dumps(runs) + "\n")
    return report(measures(runs))


def run(at_once: int, seeds: int) -> list[dict[str, Any]]:
    """All arms, each with all seeds."""
    wanted = [(arm, seed) for arm in ARMS for seed in range(seeds)]
    cores = sorted(os.sched_getaffinity(0))
    free = [cores[2 * i : 2 * i + 2] for i in range(at_once)]

    def one(arm_and_seed: tuple[str, int]) -> dict[str, Any]:
        mine = free.pop()
        try:
            return _run(*arm_and_seed, mine)
        finally:
            free.append(mine)

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, wanted))


def _run(arm: str, seed: int, cores: Sequence[int]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="treadle") as directory:
        train = (sys.executable, "-m", "treadle_cli.main", "train", "recipes/calculator.yaml")
        subprocess.run(  # noqa: S603
            [
                *("taskset", "-c", ",".join(map(str, cores))),
                *train,
                f"run.dir={directory}/run",
                "run.model=examples/calculator/policy",
                f"run.seed={seed}",
                f"experience.source.seed={seed + 1}",
                *ARMS[arm],
            ],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        done = Path(directory) / "run"
        rows = written(done, "trainer", "step")
        scores = [
            [row["evaluation"], row["step"], round(row["score"], 4)]
            for row in written(done, "experience", "evaluation")
        ]
    sys.stderr.write(f"{arm}, seed {seed}: {scores}\n")
    seconds = rows[-1]["time"] - rows[0]["time"] + rows[0]["train_s"]
    steps = [{key: round(row[key], 3) for key in KEPT if key in row} for row in rows]
    return {
        "arm": arm,
        "seed": seed,
        "rl_seconds": round(seconds, 1),
        "steps": steps,
        "scores": scores,
    }


def measures(runs: list[dict[str, Any]]) -> Iterator[Measure]:
    """First and last held-out scores of every arm, over its seeds."""
    for arm in ARMS:
        for name in ("greedy", "sampled"):
            ends = [_ends(each["scores"], name) for each in runs if each["arm"] == arm]
            before, after = zip(*ends, strict=True)
            details = {"before": before, "after": after}
            goal = "none"
            if arm == "demo":
                goal = ">= 0.93" if name == "greedy" else ">= 0.85"
            yield Measure(f"{_word(arm)}_heldout_{name}", min(after), "share", goal, details)
        seconds = [each["rl_seconds"] for each in runs if each["arm"] == arm]
        yield Measure(f"{_word(arm)}_rl_seconds", statistics.median(seconds), "s")


def _word(arm: str) -> str:
    return arm.replace(",", "").replace(" ", "_")


def _ends(scores: list[list[Any]], name: str) -> tuple[float, float]:
    of_set = sorted((step, score) for evaluation, step, score in scores if evaluation == name)
    return of_set[0][1], of_set[-1][1]


def draw(runs: list[dict[str, Any]], picture: Path) -> None:
    """Reward by step, a panel an arm and a line a seed."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")  # only who draws needs it
    pyplot.rcParams["svg.hashsalt"] = "treadle"  # the same picture from the same data
    figure, axes = pyplot.subplots(1, len(ARMS), figsize=(12, 2.8), sharey=True)
    for panel, arm in zip(axes, ARMS, strict=True):
        for each in runs:
            if each["arm"] == arm:
                steps = each["steps"]
                panel.plot([s["step"] for s in steps], [s.get("reward", 0) for s in steps], lw=1.2)
        panel.set_title(arm, fontsize=10)
        panel.set_xlabel("step")
        panel.set_ylim(0, 1)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("reward, share right")
    figure.tight_layout()
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    raise SystemExit(main())
