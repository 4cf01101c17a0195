"""Plants one fault and looks for it: `python tests/model/hunt.py NAME` ends with FOUND, or 0."""

import importlib
import logging
import sys

from ledger_model import mutants

FOUND = 3
SEEDS = 40
ACTIONS = 2000


def main(name: str) -> int:
    """Returns the exit status."""
    logging.disable()
    chosen = {each.name: each for each in (*mutants.LEDGER, *mutants.CHECKPOINTS)}[name]
    chosen.plant()
    # Only now: nothing of the code under test may be loaded before the fault is planted.
    found = _in_checkpoints() if chosen in mutants.CHECKPOINTS else _in_schedules()
    sys.stderr.write(f"{name}: {found or 'not found'}"[:300] + "\n")
    return FOUND if found else 0


def _in_schedules() -> str:
    seeds = importlib.import_module("ledger_model.seeds")
    for seed in range(SEEDS):
        found = seeds.play(seed, ACTIONS, seeds.Tally())
        if found is not None:
            return f"seed {seed}: {found.error!r}"
    return ""


def _in_checkpoints() -> str:
    checkpoints = importlib.import_module("ledger_model.checkpoints")
    try:
        checkpoints.survive(checkpoints.write_next, checkpoints.check_named)
    except checkpoints.BREACHES as error:
        return repr(error)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
