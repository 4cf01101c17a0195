"""What a run says of itself while it goes on, where there is no screen: plain lines."""

from pathlib import Path

from treadle_cli.rows import Row, RunTail
from treadle_cli.standing import Standing


class Progress:
    """Follows the metrics of a run's services and prints what a person wants to know."""

    def __init__(self, directory: Path, steps: int) -> None:
        """What the run's metrics hold by now is known, and not told."""
        self._tail = RunTail(directory)
        self.standing = Standing(steps)
        for writer, row in self._tail.rows():
            self.standing.fold(writer, row)
        self._told: set[str] = set()

    def report(self) -> None:
        """Prints what is new: a line for every step, every score and every kind of warning."""
        for writer, row in self._tail.rows():
            self.standing.fold(writer, row)
            if (writer, row["name"]) == ("experience", "evaluation"):
                print(_score_line(row), flush=True)
            elif (writer, row["name"]) == ("trainer", "step"):
                print(_step_line(self.standing), flush=True)
        warnings = self.standing.warnings()
        for kind in warnings.keys() - self._told:
            if not kind.startswith("death"):  # the supervisor's log says those
                print(f"warning: {warnings[kind]}", flush=True)
        self._told = set(warnings)


def _step_line(standing: Standing) -> str:
    row, waits = standing.last_step, standing.waits
    reward = f"{row['reward']:.3f}" if "reward" in row else "absent"
    return (
        f"step {standing.step:>4}/{standing.steps}  reward {reward}  "
        f"lag {row['lag_mean']:.1f} (max {row['lag_max']:.0f})  "
        f"{standing.engine.get('tokens_per_s', 0.0) / 1000:.1f}k tokens/s sampled, "
        f"{row['tokens_per_s'] / 1000:.1f}k trained  "
        f"waits: trainer {waits['trainer']['rollout']:.0%}, "
        f"rollout {waits.get('rollout', {}).get('trainer', 0.0):.0%}"
    )


def _score_line(row: Row) -> str:
    score = f"{row['score']:.3f}" if "score" in row else "absent"
    error = f" ± {row['std_error']:.3f}" if "std_error" in row else ""
    failed = f", {row['num_failed']} failed" if row["num_failed"] else ""
    return (
        f"held-out {row['evaluation']} {score}{error} at step {row['step']} "
        f"({row['num_scored']} scored{failed})"
    )
