"""`make chaos`: a seeded nemesis over the members of a real short run, then a reconciliation.

Kills, stops, cut and slow links and a full disk, one at a time and then in pairs, while the run
goes on; then all is healed and the run ends well, or a fault is found. Which is done to whom, and
when, follows from the seed. The members are processes, or with `--containers` our images, Redis and
NATS in containers, whose networks are taken away too. Lines for people on stderr; on stdout one
JSON object a measure. Exit status 1 where a goal does not hold; the run and what was done are kept
then.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from container_engine import NoEngineError
from container_stack import containers
from nemesis import DEADLY, Scene, plan
from process_stack import processes
from scenes import Stack, Stage
from small_run import RunFailedError, end_well_when_told

from treadle_runtime.measures import Measure, report

Planned = Callable[[list[str]], list[Scene]]
"""The scenes for the members of a run."""

_PRIVATE = "TREADLE_CHAOS_PRIVATE"
"""Environment variable: this process has mounts of its own."""
_NO_FILES = shutil.ignore_patterns("links", "sockets", "balloon", "*.sock")


def torment(parent: Path, stage: Stage, planned: Planned, recovery_s: float) -> list[Measure]:
    """Plays scenes, heals, and lets the run end. Raises RunFailedError where it does not."""
    stack, began = stage.stack, time.monotonic()
    scenes = planned(stack.begin())
    with (parent / "scenes.jsonl").open("a", encoding="utf-8") as record:
        start = time.monotonic()
        for scene in scenes:
            time.sleep(max(0.0, start + scene.at_s - time.monotonic()))  # the schedule
            row = stage.play(scene)
            record.write(json.dumps(row) + "\n")
            record.flush()
            sys.stderr.write(f"{time.monotonic() - start:6.1f} s  step {stack.step():>4}  {row}\n")
    tormented_s = time.monotonic() - start
    steps = stack.end()
    return [
        *_suffered(stage, scenes, recovery_s),
        Measure("steps", stack.step(), "steps", f"== {steps}"),
        *stack.account(),
        Measure("tormented_s", round(tormented_s, 1), "s"),
        Measure("seconds", round(time.monotonic() - began, 1), "s"),
    ]


def _suffered(stage: Stage, scenes: list[Scene], recovery_s: float) -> list[Measure]:
    deadly = [fault.target for scene in scenes for fault in scene.faults if fault.kind in DEADLY]
    kills = sum(stage.done[kind] for kind in DEADLY)
    others = {kind: count for kind, count in stage.done.items() if kind not in DEADLY}
    how = {"lost_state": stage.done["lose"], "drained": stage.done["drain"]}
    times = sorted(stage.recoveries) or [-1.0]
    return [
        Measure("kills", kills, "processes", f"== {len(deadly)}", how),
        Measure("victims", len(stage.victims), "names", f"== {len(set(deadly))}", stage.victims),
        Measure("other_faults", sum(others.values()), "faults", details=others),
        Measure("unrecovered", kills - len(stage.recoveries), "kills", "== 0"),
        Measure("recovery_p50_s", times[len(times) // 2], "s"),
        Measure("recovery_p95_s", times[int(0.95 * len(times))], "s", f"<= {recovery_s:g}"),
    ]


def main() -> int:
    """Prints the seed, the scenes and the measures."""
    args = _arguments()
    end_well_when_told()
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    sys.stderr.write(f"seed {seed}: --seed {seed} plays it again\n")
    with tempfile.TemporaryDirectory(prefix="treadle-chaos-") as folder, ExitStack() as standing:
        parent = Path(folder)
        try:
            stack = standing.enter_context(_stack(parent, args))
        except NoEngineError as error:
            sys.stderr.write(f"SKIPPED: NOTHING RUNS IN CONTAINERS HERE: {error}\n")
            return 0
        scenes = partial(plan, seed, means=stack.means, kills=args.kills, seconds=60 * args.minutes)
        measures = [Measure("seed", seed, "seed"), *_judged(parent, stack, scenes, args.recovery_s)]
    where = "_in_containers" if args.containers else ""
    return report(replace(each, measure=each.measure + where) for each in measures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--containers", action="store_true", help="over our images, not processes")
    parser.add_argument("--seed", type=int, default=None, help="a random one when left out")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=5.0, help="over which the kills come")
    parser.add_argument("--recovery-s", type=float, default=15.0, help="goal of its p95")
    parser.add_argument("--overlay", action="append", default=[], help="of `treadle train`")
    return parser.parse_args()


def _stack(parent: Path, args: argparse.Namespace) -> AbstractContextManager[Stack]:
    if args.containers:
        return containers(parent)
    return processes(parent, args.overlay, has_disk=_PRIVATE in os.environ)


def _judged(parent: Path, stack: Stack, planned: Planned, recovery_s: float) -> list[Measure]:
    try:
        measures = torment(parent, Stage(stack), planned, recovery_s)
    except RunFailedError as error:
        sys.stderr.write(f"{error}\n")
        measures = [Measure("ended", 0, "runs", "== 1")]
    if not all(measure.holds for measure in measures):
        kept = Path(tempfile.mkdtemp(prefix="treadle-chaos-kept-"))
        stack.kill()
        shutil.copytree(parent, kept, dirs_exist_ok=True, ignore=_NO_FILES)
        sys.stderr.write(f"kept in {kept}\n")
    return measures


def with_own_mounts() -> None:
    """Goes on in a mount namespace of its own, for a disk that can be filled, where it may."""
    may = ["unshare", "-m", "--propagation", "private"]
    if _PRIVATE in os.environ:
        return
    if subprocess.run([*may, "true"], capture_output=True, check=False).returncode:  # noqa: S603
        sys.stderr.write("SKIPPED: no disk is filled, mounting is not permitted here\n")
        return
    os.environ[_PRIVATE] = "1"
    os.execvp(may[0], [*may, sys.executable, *sys.argv])  # noqa: S606


if __name__ == "__main__":
    if "--containers" not in sys.argv:  # there is no disk to fill
        with_own_mounts()
    sys.exit(main())
