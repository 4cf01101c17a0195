"""Proves exact resume: `python tests/resume/main.py [--kills N] [--steps N] [--seed N]`.

Two runs whose trainer and experience processes are killed at random moments. Of the calculator's
recipe every step that is trained again has to have the same members, loss and weights as before;
the scripted one, as a whole, those of a run that nobody disturbed. Prints one JSON line a measure,
and ends with 1 where one does not hold.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from equality import trained_again, unequal_lives, unequal_runs
from lives import Lives, scripted, small

from treadle_runtime.measures import Measure, report

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
    least_kills = min(real.kills, killed.kills)
    num_unequal = len(set().union(*unequal.values()))
    return report(
        [
            Measure("kills", least_kills, "processes of each run", f">= {kills}"),
            Measure("steps_trained_again", len(again), "steps", ">= 1"),
            Measure("batches_handed_back", len(whole.rows("handed_back")), "batches", ">= 1"),
            Measure("unequal_steps", num_unequal, "steps", "== 0"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
