"""Plays the models, long: `python tests/model/main.py [--seed N]`.

Prints one JSON line a measure, and ends with 1 where one does not hold. A counter-example is on
stderr, with the command that plays it again.
"""

import argparse
import logging
import subprocess
import sys
import time
import traceback
from pathlib import Path

import hunt
from ledger_model import checkpoints, mutants
from ledger_model.seeds import Tally, play

from treadle_experience.core.transitions import CONDENSED, KINDS
from treadle_runtime.measures import Measure, report

SEEDS = 200
ACTIONS = 2000
SEEDS_ON_DISK = 40
ACTIONS_ON_DISK = 500
TRACE = 60
"""Last lines of a schedule that are shown."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one only, and show the whole schedule")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--actions", type=int, default=ACTIONS, help="of a seed")
    parser.add_argument("--ledger", choices=("memory", "sqlite", "redis"), default="memory")
    arguments = parser.parse_args()
    logging.disable()
    if arguments.seed is not None:
        one = range(arguments.seed, arguments.seed + 1)
        return min(1, _play(one, arguments.actions, arguments.ledger, Tally(), lines=None))
    return _measure(arguments.seeds, arguments.actions)


def _measure(seeds: int, actions: int) -> int:
    began = time.monotonic()
    tally = Tally()
    found = _play(range(seeds), actions, "memory", tally)
    for ledger in ("sqlite", "redis"):
        found += _play(range(SEEDS_ON_DISK), ACTIONS_ON_DISK, ledger, tally)
    moments = checkpoints.survive(checkpoints.write_next, checkpoints.check_named)
    moments += checkpoints.survive(checkpoints.finish_next, checkpoints.check_retained)
    played_s = time.monotonic() - began
    kinds, unseen = len(mutants.FAULTS), KINDS.keys() - tally.kinds.keys() - CONDENSED
    caught = sum(_is_caught(names) for names in mutants.FAULTS.values())
    return report(
        [
            Measure("seeds", seeds, "seeds", f">= {SEEDS}"),
            Measure("actions", actions, "actions a seed", f">= {ACTIONS}"),
            Measure("seeds_sqlite", SEEDS_ON_DISK, "seeds"),
            Measure("seeds_redis", SEEDS_ON_DISK, "seeds"),
            Measure("transition_kinds_unseen", len(unseen), "kinds", "== 0"),
            Measure("condensations", tally.condensed, "condensations", ">= 100"),
            Measure("forgotten", tally.forgotten, "tasks", ">= 100"),
            Measure("checkpoint_crashes", moments, "moments"),
            Measure("counterexamples", found, "seeds", "== 0"),
            Measure("mutants", kinds, "faults", ">= 5"),
            Measure("mutants_caught", caught, "faults", f"== {kinds}"),
            Measure("played", round(played_s, 1), "s"),
        ]
    )


def _play(
    seeds: range, actions: int, ledger: str, tally: Tally, *, lines: int | None = TRACE
) -> int:
    """Plays seeds; returns how many have a counter-example."""
    found = 0
    for seed in seeds:
        counter = play(seed, actions, tally, ledger=ledger)
        if counter is None:
            continue
        found += 1
        shown = counter.trace if lines is None else [counter.trace[0], *counter.trace[-lines:]]
        sys.stderr.write("\n".join(shown) + "\n")
        traceback.print_exception(counter.error)
        again = f"tests/model/main.py --ledger {ledger} --actions {actions} --seed {seed}"
        sys.stderr.write(f"seed {seed}, run {counter.run}; again: python {again}\n\n")
    sys.stderr.write(f"after {ledger}: {tally}\n")
    return found


def _is_caught(names: tuple[str, ...]) -> bool:
    command = [sys.executable, Path(hunt.__file__)]
    codes = [subprocess.run([*command, name], check=False).returncode for name in names]
    return all(code == hunt.FOUND for code in codes)


if __name__ == "__main__":
    sys.exit(main())
