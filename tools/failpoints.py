"""`make failpoints`: fails at every named place of the services, in short runs that must go on.

Every name ends its process once (`exit`); some, by the seed, raise or stand still for two seconds.
A run carries as many names as its supervisor's patience allows. Lines for people on stderr; on
stdout one JSON object a measure. Exit status 1 where a goal does not hold.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from small_run import RunFailedError, SmallRun, account

from treadle_runtime.measures import Measure, report

_EXIT, _RAISE, _SLEEP = "exit:86", "raise", "sleep:2"
_DEATHS = 4
"""Most names of one service in one run; its supervisor gives up at the sixth death in a row."""
_RAISING = 5
"""Names that also raise, in one run: all may be of one service."""
_SLEEPING = 12
"""Names that also stand still."""
_STEPS = 20


@dataclass(frozen=True, slots=True)
class Armed:
    """What one name is told to do, at which hit of a process."""

    name: str
    action: str
    hit: int

    def __str__(self) -> str:
        return f"{self.name}={self.action}@{self.hit}"


def listed() -> list[str]:
    """What `treadle failpoints` prints."""
    command = [sys.executable, "-m", "treadle_cli.main", "failpoints"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.split()


def plan(names: list[str], seed: int, *, short: bool) -> list[list[Armed]]:
    """The runs: each name exits, and samples raise and sleep. Short: one run, two of a service."""
    chance = random.Random(seed)  # noqa: S311, a schedule, no secret
    if short:
        by_service: dict[str, list[str]] = defaultdict(list)
        for name in names:
            by_service[name.partition(".")[0]].append(name)
        chosen = [name for group in by_service.values() for name in chance.sample(group, 2)]
        return [[_armed(name, chance.choice((_EXIT, _RAISE, _SLEEP)), chance) for name in chosen]]
    sample = chance.sample(names, _RAISING + _SLEEPING)
    others = [_armed(name, _RAISE, chance) for name in sample[:_RAISING]]
    others += [_armed(name, _SLEEP, chance) for name in sample[_RAISING:]]
    return [*_in_runs([_armed(name, _EXIT, chance) for name in names]), others]


def _armed(name: str, action: str, chance: random.Random) -> Armed:
    # A process starts once.
    return Armed(name, action, 1 if ".start." in name else chance.randint(1, 2))


def _in_runs(armed: list[Armed]) -> list[list[Armed]]:
    """Deals them out evenly, so that no service dies too often in one run."""
    of_service: dict[str, list[Armed]] = defaultdict(list)
    for each in armed:
        of_service[each.name.partition(".")[0]].append(each)
    runs: list[list[Armed]] = [[] for _ in range(-(-max(map(len, of_service.values())) // _DEATHS))]
    for group in of_service.values():
        for place, each in enumerate(group):
            runs[place % len(runs)].append(each)
    return runs


def fail(directory: Path, armed: list[Armed]) -> list[Measure]:
    """One run with these names armed. Raises RunFailedError where it has no end."""
    spent = directory.with_name(f"{directory.name}-spent")
    spent.mkdir()
    env = {
        "TREADLE_FAILPOINTS": ",".join(map(str, armed)),
        "TREADLE_FAILPOINTS_SPENT": str(spent),
    }
    run = SmallRun(directory, f"experience.steps={_STEPS}", env=env)
    run.start()
    try:
        run.finish(timeout_s=240)
    finally:
        run.kill()
    fired = {path.name for path in spent.iterdir()}
    silent = sorted({each.name for each in armed} - fired)
    if silent:
        sys.stderr.write(f"never reached: {', '.join(silent)}\n")
    return [
        Measure("steps", run.step(), "steps", f"== {_STEPS}"),
        Measure("silent", len(silent), "failpoints", "== 0"),
        *account(run),
    ]


def main() -> int:
    """Prints the seed and the measures over all runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="a random one when left out")
    parser.add_argument("--short", action="store_true", help="one run, a sample of names")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    names, began = listed(), time.monotonic()
    runs = plan(names, seed, short=args.short)
    broken: list[str] = []
    for number, armed in enumerate(runs):
        sys.stderr.write(f"seed {seed}, run {number}: {', '.join(map(str, armed))}\n")
        with tempfile.TemporaryDirectory(prefix="treadle-failpoints-") as parent:
            try:
                measures = fail(Path(parent) / "run", armed)
            except RunFailedError as error:
                sys.stderr.write(f"{error}\n")
                measures = [Measure("ended", 0, "runs", "== 1")]
        found = [each.line() for each in measures if not each.holds]
        sys.stderr.write("".join(f"does not hold: {line}" for line in found))
        broken += found
    return report(
        [
            Measure("seed", seed, "seed"),
            Measure("failpoints", len(names), "names", ">= 20"),
            Measure("failures", sum(map(len, runs)), "failures"),
            Measure("runs", len(runs), "runs"),
            Measure("broken", len(broken), "measures", "== 0"),
            Measure("seconds", round(time.monotonic() - began, 1), "s"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
