"""A trainer that stands still: the store stays bounded, its producers wait, and nothing is lost.

`python tools/stopped_trainer.py [--seconds 600]` stops the trainer of a short run while rollout
goes on, watches the memory of the experience process, wakes the trainer, lets the run end, and
reconciles. The cap is what the process had before, and the payloads of a full window. Prints one
JSON line a measure, and ends with 1 where one does not hold.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path

from small_run import RunFailedError, SmallRun, account, end_well_when_told, state_of

from treadle_runtime.measures import Measure, report

TASKS_PER_STEP, GROUP_SIZE, MAX_LAG = 8, 4, 4
WINDOW = (MAX_LAG + 1) * TASKS_PER_STEP
BEFORE, STEPS = 6, 12
"""Steps before the stop, and in all."""
_PATIENCE_S = 180.0
_LOOK_S = 0.25


def resident(pid: int) -> int:
    """Bytes of a process that are in memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    if found is None:
        raise RunFailedError(f"process {pid} is gone")
    return int(found[1]) * 1024


def stand_still(run: SmallRun, seconds: float) -> tuple[int, int]:
    """Stops the trainer for so long; the store's memory before, and its peak while it stood."""
    there = run.wait_for("the stop", lambda: run.step() >= BEFORE, timeout_s=_PATIENCE_S)
    trainer, experience = run.victim("trainer"), run.victim("experience")
    if not there or trainer is None or experience is None:
        raise RunFailedError(f"it ended before the stop\n{run.logs()}")
    before = peak = resident(experience)
    os.kill(trainer, signal.SIGSTOP)
    until = time.monotonic() + seconds
    while time.monotonic() < until:  # the fault itself
        time.sleep(_LOOK_S)
        peak = max(peak, resident(experience))
    if state_of(trainer) != "T" or run.victim("experience") != experience:
        raise RunFailedError(f"the trainer or the store had another life\n{run.logs()}")
    os.kill(trainer, signal.SIGCONT)
    return before, peak


def _waiting(run: SmallRun) -> int:
    """Most tasks that were open or ready at once."""
    rows = run.rows("experience", "counts")
    return max(int(row.get("tasks_open", 0) + row.get("tasks_ready", 0)) for row in rows)


def measure(directory: Path, seconds: float, overlays: list[str]) -> list[Measure]:
    """Plays it. Raises RunFailedError where the run does not end as it must."""
    run = SmallRun(
        directory,
        f"experience.steps={STEPS}",
        f"experience.tasks_per_step={TASKS_PER_STEP}",
        f"experience.max_lag={MAX_LAG}",
        "experience.evaluation=null",
        f"run.hung_s={seconds + 600}",
        overlays=overlays,
    )
    run.start()
    try:
        before, peak = stand_still(run, seconds)
        run.finish(timeout_s=_PATIENCE_S)
    finally:
        run.kill()
    payloads = [row.get("payload_bytes", 0) for row in run.rows("experience", "counts")]
    cap = before + max(payloads)
    sizes = {"before_mb": before >> 20, "peak_mb": peak >> 20, "payload_bytes": max(payloads)}
    return [
        Measure("stopped_s", seconds, "s"),
        Measure("rss_over_cap_stopped_trainer", peak / cap, "ratio", "<= 1.2", details=sizes),
        Measure("most_tasks_waiting", _waiting(run), "tasks", f"<= {WINDOW}"),
        Measure("steps", run.step(), "steps", f"== {STEPS}"),
        *account(run),
    ]


def main() -> int:
    """Prints the measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long it stands still")
    parser.add_argument("--overlay", action="append", default=[], help="of `treadle train`")
    args = parser.parse_args()
    end_well_when_told()
    with tempfile.TemporaryDirectory(prefix="treadle-stopped-") as parent:
        try:
            measures = measure(Path(parent) / "run", args.seconds, args.overlay)
        except RunFailedError as error:
            sys.stderr.write(f"{error}\n")
            measures = [Measure("ended", 0, "runs", "== 1")]
    return report(measures)


if __name__ == "__main__":
    sys.exit(main())
