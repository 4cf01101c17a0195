"""`make chaos-selftest`: a harness that finds no planted fault proves nothing.

Each proof is run as it is, and has to hold; and once with each fault that it is to find, planted in
the code under test, and has to fail for that. Lines for people on stderr; on stdout one JSON object
a measure. Exit status 1 where a fault is not found, or a proof finds one that is not there.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from planted import planted

from treadle_runtime.measures import Measure, report

ROOT = Path(__file__).parent.parent.parent
_SLOW = ("--recovery-s", "60")
"""How fast is no question here."""
HUNT = ("tests/model/hunt.py",)
POWER = ("-m", "pytest", "-qx", "tests/chaos/test_power.py", "-k", "acknowledged")
TRAINERS = ("-m", "pytest", "-qx", "tests/chaos/test_two_trainers.py")
SILENCE = ("-m", "pytest", "-qx", "tests/chaos/test_silent_doorbell.py", "-k", "lost_ring")
NEMESIS = ("tools/chaos.py", "--seed", "3", "--kills", "4", "--minutes", "0.4", *_SLOW)
_FOUND = 3
"""Exit status of a hunt that found it."""
_LONGEST_S = 600


@dataclass(frozen=True, slots=True)
class Fault:
    """One changed line of a module, and the proof that has to find it."""

    kind: str
    proof: tuple[str, ...]
    says: str
    """What the proof prints then, and only then."""
    module: str
    before: str
    after: str

    @property
    def environment(self) -> dict[str, str]:
        return planted({"module": self.module, "before": self.before, "after": self.after})


FAULTS = (
    Fault(
        "acknowledge_before_fsync",
        POWER,
        "was never issued",
        "treadle_experience.adapters.sqlite",
        "PRAGMA synchronous = FULL",
        "PRAGMA synchronous = OFF",
    ),
    Fault(
        "acknowledge_before_fsync",
        POWER,
        "is not in the store",
        "treadle_payloads.files",
        "os.fsync(file.fileno())",
        "pass",
    ),
    Fault(
        "skipped_fence",
        TRAINERS,
        "FAILED",
        "treadle_experience.core.run",
        "    if trainer_epoch != state.trainer_epoch:\n",
        "    if trainer_epoch < 0:\n",
    ),
    Fault(
        "dropped_sweeper",
        SILENCE,
        "the sweep is late",
        "treadle_runtime.doorbell",
        "SWEEP_S = 5.0\n",
        "SWEEP_S = 3600.0\n",
    ),
    Fault(
        "partial_group",
        NEMESIS,
        '"holds": false',
        "treadle_experience.core.groups",
        "    elif live:\n",
        "    elif live > 1:\n",
    ),
)
"""Found by processes that are hurt."""

HUNTED = {
    "acknowledge_before_flush": "ack_before_flush",
    "skipped_fence_of_writers": "skipped_fence_of_writers",
    "skipped_fence_of_attempts": "skipped_fence_of_attempts",
    "non_atomic_rename": "non_atomic_rename",
    "partial_group_in_model": "partial_group",
}
"""Found by the models of tests/model, by kind."""


def run(words: tuple[str, ...], **environment: str) -> tuple[int, str]:
    """The status of a proof, and all that it said."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LONGEST_S,
        check=False,
    )
    return done.returncode, done.stdout


def is_found(fault: Fault) -> bool:
    """Whether the proof fails, for the fault that is planted."""
    status, said = run(fault.proof, **fault.environment)
    found = status == 1 and _says(said, fault.says)
    tell(f"{fault.kind} in {fault.module}", fault.proof, found=found, said=said)
    return found


def _says(said: str, words: str) -> bool:
    """In a line that is no measure, or in that of a measure that does not hold."""
    lines = [line for line in said.splitlines() if words in line]
    return any('"holds": true' not in line for line in lines)


def is_hunted(kind: str, name: str) -> bool:
    status, said = run((*HUNT, name))
    tell(kind, (*HUNT, name), found=status == _FOUND, said=said)
    return status == _FOUND


def tell(what: str, proof: tuple[str, ...], *, found: bool, said: str) -> None:
    sys.stderr.write(f"{'found' if found else 'NOT FOUND'}: {what}, by {' '.join(proof)}\n")
    if not found:
        sys.stderr.write(said[-3000:])


def main() -> int:
    """Prints the measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="kinds that have this in their name")
    only, began = parser.parse_args().only, time.monotonic()
    faults = [fault for fault in FAULTS if only in fault.kind]
    hunted = {kind: name for kind, name in HUNTED.items() if only in kind}
    false = 0
    for proof in dict.fromkeys(fault.proof for fault in faults):
        status, said = run(proof)
        false += status != 0
        if status:
            sys.stderr.write(f"FALSE ALARM: {' '.join(proof)}\n{said[-3000:]}")
    caught = sum(is_found(fault) for fault in faults)
    caught += sum(is_hunted(kind, name) for kind, name in hunted.items())
    mutants = len(faults) + len(hunted)
    return report(
        [
            Measure("mutants", mutants, "faults", ">= 1" if only else ">= 10"),
            Measure("mutants_caught", caught, "faults", f"== {mutants}"),
            Measure("false_alarms", false, "proofs", "== 0"),
            Measure("seconds", round(time.monotonic() - began, 1), "s"),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
