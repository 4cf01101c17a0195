"""What a run says of itself while it goes on: a plain line for every step and every score."""

import asyncio
import json
from pathlib import Path
from typing import Any

_POLL_S = 0.3


class MetricsTail:
    """Reads the rows that one service adds to its metrics file."""

    def __init__(self, path: Path, *, from_end: bool) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def rows(self) -> list[dict[str, Any]]:
        """Rows since the last call; a row that is still being written waits."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


class Progress:
    """Follows the metrics of a run's services and prints what a person wants to know."""

    def __init__(self, directory: Path, steps: int) -> None:
        metrics = directory / "metrics"
        self._steps = steps
        self._trainer = MetricsTail(metrics / "trainer.jsonl", from_end=True)
        self._rollout = MetricsTail(metrics / "rollout.jsonl", from_end=True)
        self._experience = MetricsTail(metrics / "experience.jsonl", from_end=True)
        self._engine: dict[str, Any] = {}
        self._last_step_time = 0.0
        self._rollout_waits = 0.0

    async def follow(self) -> None:
        """Prints until it is cancelled."""
        while True:
            self.report()
            await asyncio.sleep(_POLL_S)

    def report(self) -> None:
        """Prints what is new."""
        for row in self._rollout.rows():
            if row["name"] == "rollout":
                self._note_engine(row)
        for row in self._experience.rows():
            if row["name"] == "evaluation":
                print(_evaluation_line(row), flush=True)
        for row in self._trainer.rows():
            if row["name"] == "step":
                print(self._step_line(row), flush=True)

    def _note_engine(self, row: dict[str, Any]) -> None:
        if self._engine:
            wall_s = max(row["time"] - self._engine["time"], 1e-3)
            waited_s = row.get("waited_s", 0.0) - self._engine.get("waited_s", 0.0)
            self._rollout_waits = min(max(waited_s / wall_s, 0.0), 1.0)
        self._engine = row

    def _step_line(self, row: dict[str, Any]) -> str:
        wall_s = row["time"] - self._last_step_time if self._last_step_time else row["train_s"]
        self._last_step_time = row["time"]
        trainer_waits = min(row["wait_s"] / max(wall_s, 1e-3), 1.0)
        reward = f"{row['reward']:.3f}" if "reward" in row else "absent"
        sampled = f"{self._engine.get('tokens_per_s', 0.0) / 1000:.1f}k"
        return (
            f"step {int(row['step']):>4}/{self._steps}  reward {reward}  "
            f"lag {row['lag_mean']:.1f} (max {row['lag_max']:.0f})  "
            f"{sampled} tokens/s sampled, {row['tokens_per_s'] / 1000:.1f}k trained  "
            f"waits: trainer {trainer_waits:.0%}, rollout {self._rollout_waits:.0%}"
        )


def _evaluation_line(row: dict[str, Any]) -> str:
    score = f"{row['score']:.3f}" if "score" in row else "absent"
    failed = f", {row['num_failed']} failed" if row["num_failed"] else ""
    return (
        f"held-out {row['evaluation']} {score} at step {int(row['step'])} "
        f"({row['num_scored']} scored{failed})"
    )
