"""`make chaos-smoke`: kills and stops every service during a short run, then reconciles it.

Which service is hurt how, in which order and at which step follows from the seed. Lines for people
on stderr; on stdout one JSON object a measure. Exit status 1 where a goal does not hold.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from small_run import SERVICES, RunFailedError, SmallRun, account

from treadle_runtime.measures import Measure, report

_STOPS_S = (3.1, 6.0)
"""Shortest and longest stop: about the lease of an episode, and twice that."""
_MOST_GAP = 3
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to whom, and how many steps after the one before; and how long."""

    service: str
    signum: signal.Signals
    gap: int
    stop_s: float


def plan(seed: int, *, short: bool) -> list[Fault]:
    """Every service is killed and stopped; in the short form, one of both each."""
    chance = random.Random(seed)  # noqa: S311, a schedule, no secret
    signums = (signal.SIGKILL, signal.SIGSTOP)
    if short:
        order = chance.sample(SERVICES, len(SERVICES))
        pairs = [(name, signums[place % 2]) for place, name in enumerate(order)]
    else:
        pairs = [(name, signum) for name in SERVICES for signum in signums]
        chance.shuffle(pairs)
    return [
        Fault(name, signum, chance.randint(1, _MOST_GAP), chance.uniform(*_STOPS_S))
        for name, signum in pairs
    ]


def hurt(run: SmallRun, fault: Fault, at_step: int) -> bool:
    """Does it to the process that serves when the run has come to the step.

    Returns whether it was done; False when the run ended before.
    """
    there = run.wait_for(
        f"{fault.service} at step {at_step}",
        lambda: run.step() >= at_step and run.victim(fault.service) is not None,
        timeout_s=_PATIENCE_S,
    )
    pid = run.victim(fault.service)
    if not there or pid is None:
        return False
    sys.stderr.write(f"step {run.step():>3}: {fault.signum.name} to {fault.service}, {pid}\n")
    os.kill(pid, fault.signum)
    if fault.signum is signal.SIGSTOP:
        run.wait_for("a stop", lambda: _state(pid) == "T", timeout_s=5)
        time.sleep(fault.stop_s)  # the fault itself
        os.kill(pid, signal.SIGCONT)
        return True
    return run.wait_for("a death", lambda: _was_killed(run, pid), timeout_s=10)


def _state(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()[0]


def _was_killed(run: SmallRun, pid: int) -> bool:
    deaths = run.rows("supervisor", "death")
    return any(row["pid"] == pid and row["signal"] == "SIGKILL" for row in deaths)


def torment(directory: Path, faults: list[Fault], steps: int) -> list[Measure]:
    """Runs it to its end. Raises RunFailedError where it has none."""
    began = time.monotonic()
    run = SmallRun(directory, f"experience.steps={steps}")
    run.start()
    try:
        done = [fault for fault in faults if hurt(run, fault, run.step() + fault.gap)]
        run.finish(timeout_s=_PATIENCE_S + steps)
    finally:
        run.kill()
    killed = {fault.service for fault in done if fault.signum is signal.SIGKILL}
    stopped = {fault.service for fault in done if fault.signum is signal.SIGSTOP}
    planned = sum(fault.signum is signal.SIGKILL for fault in faults)
    return [
        Measure("steps", run.step(), "steps", f"== {steps}"),
        Measure("kills", len(killed), "services", f">= {planned}"),
        Measure("stops", len(stopped), "services", f">= {len(faults) - planned}"),
        *account(run),
        Measure("seconds", round(time.monotonic() - began, 1), "s"),
    ]


def main() -> int:
    """Prints the seed, the faults and the measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="a random one when left out")
    parser.add_argument("--short", action="store_true", help="one fault for each service")
    parser.add_argument("--steps", type=int, default=None)
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if args.seed is None else args.seed
    faults = plan(seed, short=args.short)
    sys.stderr.write(f"seed {seed}: {', '.join(f'{f.signum.name} {f.service}' for f in faults)}\n")
    with tempfile.TemporaryDirectory(prefix="treadle-chaos-") as parent:
        try:
            measures = torment(Path(parent) / "run", faults, args.steps or 5 * len(faults))
        except RunFailedError as error:
            sys.stderr.write(f"seed {seed}: {error}\n")
            measures = [Measure("ended", 0, "runs", "== 1")]
        if not all(measure.holds for measure in measures):
            kept = Path(tempfile.mkdtemp(prefix="treadle-chaos-kept-"))
            shutil.copytree(Path(parent) / "run", kept, dirs_exist_ok=True)
            sys.stderr.write(f"kept in {kept}\n")
    return report([Measure("seed", seed, "seed"), *measures])


if __name__ == "__main__":
    sys.exit(main())
