"""Proves exact resume: `python tests/resume/main.py [--ledger NAME] [--kills N] [--steps N]`.

On every ledger, two runs whose trainer and experience processes are killed at random moments. Of
the calculator's recipe every step that is trained again has to have the same members, loss and
weights as before; the scripted one, as a whole, those of a run that nobody disturbed. Prints one
JSON line a measure, and ends with 1 where one does not hold.
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
LEDGERS = ("sqlite", "redis")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", choices=LEDGERS, action="append", help="all when left out")
    parser.add_argument("--kills", type=int, default=10, help="of each of both runs")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="draws the moments of the kills")
    arguments = parser.parse_args()
    status = 0
    for ledger in arguments.ledger or LEDGERS:
        with tempfile.TemporaryDirectory(prefix="treadle-resume-") as directory:
            status |= report(
                prove(Path(directory), ledger, arguments.kills, arguments.steps, arguments.seed)
            )
    return status


def prove(directory: Path, ledger: str, kills: int, steps: int, seed: int) -> list[Measure]:
    """Plays the runs in `directory`; what they measure."""
    on = f"experience.ledger.name={ledger}"
    real = Lives(directory / "real", CALCULATOR, *small(steps), on)
    real.run(kills=kills, seed=seed)
    killed = Lives(directory / "killed", SCRIPTED, *scripted(steps), on)
    killed.run(kills=kills, seed=seed + 1)
    whole = Lives(directory / "whole", SCRIPTED, *scripted(steps), on)
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
    of = {"ledger": ledger}
    return [
        Measure("kills", least_kills, "processes of each run", f">= {kills}", details=of),
        Measure("steps_trained_again", len(again), "steps", ">= 1", details=of),
        Measure(
            "batches_handed_back", len(whole.rows("handed_back")), "batches", ">= 1", details=of
        ),
        Measure("unequal_steps", num_unequal, "steps", "== 0", details=of),
    ]


if __name__ == "__main__":
    sys.exit(main())
