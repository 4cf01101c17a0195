"""Proves exact resume: `python tests/resume/main.py [--kills N] [--steps N] [--seed N]`.

Two runs whose trainer and experience processes are killed at random moments. Of the calculator's
recipe every step that is trained again has to have the same members, loss and weights as before;
the scripted one, as a whole, those of a run that nobody disturbed. Prints one JSON line a measure,
and ends with 1 where one does not hold.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from equality import trained_again, unequal_lives, unequal_runs
from lives import Lives, scripted, small

CALCULATOR = "recipes/calculator.yaml"
SCRIPTED = "tests/resume/scripted.yaml"


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each of both runs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="draws the moments of the kills")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="treadle-resume-") as directory:
        return prove(Path(directory), arguments.kills, arguments.steps, arguments.seed)


def prove(directory: Path, kills: int, steps: int, seed: int) -> int:
    """Plays the runs in `directory`, and prints the measures."""
    real = Lives(directory / "real", CALCULATOR, *small(steps))
    real.run(kills=kills, seed=seed)
    killed = Lives(directory / "killed", SCRIPTED, *scripted(steps))
    killed.run(kills=kills, seed=seed + 1)
    whole = Lives(directory / "whole", SCRIPTED, *scripted(steps))
    whole.run()

    again = trained_again(real.rows()) | trained_again(killed.rows())
    unequal = {
        "calculator, between lives": unequal_lives(real.rows()),
        "scripted, between lives": unequal_lives(killed.rows()),
        "scripted, killed and whole": unequal_runs(killed, whole, steps),
    }
    for what, found in unequal.items():
        sys.stderr.write(f"{what}: unequal steps {found}\n" if found else f"{what}: equal\n")
    held = [
        _measure("kills", min(real.kills, killed.kills), "processes of each run", at_least=kills),
        _measure("steps_trained_again", len(again), "steps", at_least=1),
        _measure("batches_handed_back", len(whole.rows("handed_back")), "batches", at_least=1),
        _measure("unequal_steps", len(set().union(*unequal.values())), "steps"),
    ]
    return 0 if all(held) else 1


def _measure(name: str, value: int, unit: str, at_least: int | None = None) -> bool:
    """Prints a measure whose goal is a least value, or else 0; whether it holds."""
    holds = value == 0 if at_least is None else value >= at_least
    goal = 0 if at_least is None else f">= {at_least}"
    line = {"measure": name, "value": value, "unit": unit, "goal": goal, "holds": holds}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    return holds


if __name__ == "__main__":
    sys.exit(main())
