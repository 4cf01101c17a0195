"""`make failpoints`: fails at every named place of the services, in short runs that must go on.

At every name that `treadle failpoints` lists a process ends once (`exit`), raises once, and stands
still for two seconds once. A run carries as many names as its supervisor's patience allows, and has
the adapters that its names are in. Lines for people on stderr; on stdout one JSON object a measure.
Exit status 1 where a goal does not hold; a name that no run comes to is one.
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

from small_run import RunFailedError, SmallRun, account, end_well_when_told

from treadle_runtime.measures import Measure, report

_EXIT, _RAISE, _SLEEP = "exit:86", "raise", "sleep:2"
_DEATHS = 4
"""Most names of one service in one run; its supervisor gives up at the sixth death in a row."""
_STEPS = 20


@dataclass(frozen=True, slots=True)
class Setting:
    """A run that comes to names which others do not come to."""

    prefixes: tuple[str, ...]
    """Beginnings of the names; each belongs to the first setting that has its beginning."""
    overrides: tuple[str, ...] = ()
    is_walked: bool = True
    """Whether the whole journal is there afterwards."""


SETTINGS = (
    Setting(
        ("experience.redis.", "experience.archive.", "payloads."),
        (
            "experience.ledger={name: redis, durability: fleet, archive: ARCHIVE}",
            "run.payloads={name: sidecar}",
            "experience.condense_after=150",
        ),
        is_walked=False,
    ),
    Setting(
        ("experience.condense.", "experience.ledger.before_condensed"),
        ("experience.condense_after=150",),
        is_walked=False,
    ),
    Setting(("",)),
)


def setting_of(name: str) -> Setting:
    """The run that comes to a name."""
    return next(each for each in SETTINGS if name.startswith(each.prefixes))


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


def plan(names: list[str], seed: int, *, short: bool) -> list[tuple[Setting, list[Armed]]]:
    """The runs: each name exits, raises and sleeps. Short: one run, and two names of a service."""
    chance = random.Random(seed)  # noqa: S311, a schedule, no secret
    if short:
        common = _by_service([name for name in names if setting_of(name) is SETTINGS[-1]])
        chosen = [name for group in common.values() for name in chance.sample(group, 2)]
        armed = [_armed(name, chance.choice((_EXIT, _RAISE, _SLEEP)), chance) for name in chosen]
        return [(SETTINGS[-1], armed)]
    runs: list[tuple[Setting, list[Armed]]] = []
    for setting in SETTINGS:
        own = [name for name in names if setting_of(name) is setting]
        dealt = _dealt(chance.sample(own, len(own)))
        for action in (_EXIT, _RAISE, _SLEEP):
            runs += [(setting, [_armed(name, action, chance) for name in hand]) for hand in dealt]
    return runs


def _armed(name: str, action: str, chance: random.Random) -> Armed:
    # A process starts once, and does not condense often.
    is_rare = ".start." in name or "condense" in name
    return Armed(name, action, 1 if is_rare else chance.randint(1, 2))


def _by_service(names: list[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[name.partition(".")[0]].append(name)
    return groups


def _dealt(names: list[str]) -> list[list[str]]:
    """Deals them out evenly, so that no service dies too often in one run."""
    groups = _by_service(names).values()
    hands: list[list[str]] = [[] for _ in range(-(-max(map(len, groups)) // _DEATHS))]
    for group in groups:
        for place, name in enumerate(group):
            hands[place % len(hands)].append(name)
    return hands


def fail(directory: Path, setting: Setting, armed: list[Armed]) -> list[Measure]:
    """One run with these names armed. Raises RunFailedError where it has no end."""
    archive = directory.with_name(f"{directory.name}-archive")
    overrides = [word.replace("ARCHIVE", str(archive)) for word in setting.overrides]
    spent = directory.with_name(f"{directory.name}-spent")
    spent.mkdir()
    env = {
        "TREADLE_FAILPOINTS": ",".join(map(str, armed)),
        "TREADLE_FAILPOINTS_SPENT": str(spent),
    }
    run = SmallRun(directory, f"experience.steps={_STEPS}", *overrides, env=env)
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
        *account(run, walked=setting.is_walked),
    ]


def main() -> int:
    """Prints the seed and the measures over all runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="a random one when left out")
    parser.add_argument("--short", action="store_true", help="one run, a sample of names")
    args = parser.parse_args()
    end_well_when_told()
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    names, began = listed(), time.monotonic()
    runs = plan(names, seed, short=args.short)
    broken: list[str] = []
    for number, (setting, armed) in enumerate(runs):
        sys.stderr.write(f"seed {seed}, run {number}: {', '.join(map(str, armed))}\n")
        with tempfile.TemporaryDirectory(prefix="treadle-failpoints-") as parent:
            try:
                measures = fail(Path(parent) / "run", setting, armed)
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
            Measure("failures", sum(len(armed) for _, armed in runs), "failures"),
            Measure("runs", len(runs), "runs"),
            Measure("broken", len(broken), "measures", "== 0"),
            Measure("seconds", round(time.monotonic() - began, 1), "s"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
