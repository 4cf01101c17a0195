"""A small `treadle train` to be hurt, and what its ledger says after: for the proofs in `tools`.

A ledger that is a file is read here with SQL and JSON alone, so that its account does not rest on
the code that it judges.
"""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from treadle_cli.rows import written
from treadle_experience.core.transitions import Transition, kind_of, to_body
from treadle_experience.ledgers import read_ledger
from treadle_runtime.measures import Measure

ROOT = Path(__file__).parent.parent
TREADLE = ("-m", "treadle_cli.main")
"""What makes Python the command that is under test."""
RECIPE = "recipes/calculator.yaml"
SERVICES = ("experience", "rollout", "trainer", "refit")
GROUP_SIZE = 4
CALCULATOR = "examples/calculator/tasks.py:CalculatorTasks"
HELD_OUT = (
    f'{{every: 10, sets: [{{name: greedy, source: {{name: "{CALCULATOR}", split: heldout}}, '
    "limit: 16, sampling: {temperature: 0, max_tokens: 14}}]}"
)
SMALL = (
    "experience.tasks_per_step=4",
    f"experience.group_size={GROUP_SIZE}",
    f"experience.evaluation={HELD_OUT}",
    "experience.lease_s=3",
    "experience.retries=8",
    "run.inline_bytes=640",
    "rollout.slots=16",
    "trainer.checkpoint_every=2",
)
_LOOK_S = 0.05


Journal = list[tuple[str, dict[str, Any]]]
"""Transitions by kind and content, in their order."""


class RunFailedError(RuntimeError):
    """The run did not do what it must; the message has the ends of its logs."""


class SmallRun:
    """One run directory and the `treadle train` that works on it."""

    def __init__(
        self,
        directory: Path,
        *overrides: str,
        overlays: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """`overlays` are files, and `overrides` SECTION.KEY=VALUE, as the command takes them."""
        self.directory = directory
        self.program: Sequence[str] = TREADLE
        """What Python is to run in the lives that come."""
        self._overrides = overrides
        self._overlays = [word for path in overlays for word in ("--overlay", path)]
        self._env = os.environ | (env or {})
        self._log = directory.parent / f"{directory.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        """Starts it, or goes on with it; `more` words are of this life only."""
        words = ["train", *self._overlays, RECIPE, f"run.dir={self.directory}"]
        words += [*SMALL, *self._overrides, *more]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603, the command that is under test
                [sys.executable, *self.program, *words],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
            )

    def rows(self, service: str, name: str) -> list[dict[str, Any]]:
        """Rows of one kind of a service's metrics (`supervisor`: starts and deaths)."""
        return written(self.directory, service, name)

    def step(self) -> int:
        """Last step that the trainer finished."""
        return max((row["step"] for row in self.rows("trainer", "step")), default=0)

    def victim(self, service: str) -> int | None:
        """The process that the supervisor runs as this service now; None between two lives."""
        starts = [row for row in self.rows("supervisor", "start") if row["service"] == service]
        dead = {row["pid"] for row in self.rows("supervisor", "death")}
        if not starts or starts[-1]["pid"] in dead:
            return None
        return int(starts[-1]["pid"])

    def victims(self) -> list[str]:
        """Everyone whom the supervisor has started: the services, and the run's own servers."""
        return sorted({row["service"] for row in self.rows("supervisor", "start")})

    def wait_for(self, what: str, holds: Callable[[], bool], *, timeout_s: float) -> bool:
        """Whether it came to hold before the run's end. Raises RunFailedError when time is up."""
        give_up = time.monotonic() + timeout_s
        while not holds():
            if self._running.poll() is not None:
                return holds()
            if time.monotonic() > give_up:
                raise RunFailedError(f"{what}: not within {timeout_s:.0f} s\n{self.logs()}")
            time.sleep(_LOOK_S)
        return True

    def finish(self, *, timeout_s: float) -> None:
        """Waits for the end. Raises RunFailedError unless it comes, with status 0."""
        self._end(0, timeout_s)

    def _end(self, expected: int, timeout_s: float) -> None:
        try:
            status = self._running.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RunFailedError(f"no end within {timeout_s:.0f} s\n{self.logs()}") from error
        if status != expected:
            raise RunFailedError(f"ended with status {status}\n{self.logs()}")

    def interrupt(self, *, timeout_s: float) -> None:
        """Lets it drain, as Ctrl-C does. Raises RunFailedError unless it does, and says so."""
        self._running.send_signal(signal.SIGINT)
        self._end(130, timeout_s)

    def kill(self) -> None:
        """Ends what is left of it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for service in self.victims():
            pid = self.victim(service)
            # Nobody else's, should the number have another process by now.
            if pid and str(self.directory) in _of_process(pid, "cmdline", "environ", "cwd"):
                os.kill(pid, signal.SIGKILL)

    @property
    def _running(self) -> "subprocess.Popen[bytes]":
        if self._process is None:
            raise RunFailedError("it was never started")
        return self._process

    def logs(self) -> str:
        """The ends of all logs."""
        paths = [self._log, *sorted((self.directory / "logs").glob("*.log"))]
        return "\n".join(
            f"--- {path.name}\n{path.read_text(encoding='utf-8', errors='replace')[-2500:]}"
            for path in paths
            if path.exists()
        )

    def fsck(self) -> tuple[bool, dict[str, Any]]:
        """Whether `treadle fsck` holds, and its values by name."""
        done = subprocess.run(  # noqa: S603, the command that is under test
            [sys.executable, *TREADLE, "fsck", str(self.directory)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.stderr.write(done.stdout + done.stderr)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        return done.returncode == 0, {row["measure"]: row["value"] for row in rows}

    def journal(self) -> Journal:
        """All transitions of its ledger."""
        path = self.directory / "ledger.sqlite"
        if not path.exists():
            return bodies(read_ledger(self.directory).journal)
        uri = f"{path.resolve().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            rows = db.execute("SELECT kind, body FROM journal ORDER BY position").fetchall()
        return [(kind, json.loads(body)) for kind, body in rows]


def bodies(journal: Iterable[Transition]) -> Journal:
    """Transitions by kind and content."""
    return [(kind_of(each), to_body(each)) for each in journal]


def end_well_when_told() -> None:
    """From here on SIGTERM ends this process as Ctrl-C does: what it started goes first."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _of_process(pid: int, *files: str) -> str:
    """What the kernel says of a process; nothing when it is gone."""
    found: list[str] = []
    for name in files:
        path = Path(f"/proc/{pid}/{name}")
        with contextlib.suppress(OSError):
            found.append(
                str(path.readlink()) if path.is_symlink() else path.read_text(errors="replace")
            )
    return "\n".join(found)


def state_of(pid: int) -> str | None:
    """What a process does, as the kernel's letter: `R`, `S`, `T`, ...; None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a walk over the claims of a ledger found."""

    claimed_tasks: int
    partial_groups: int
    """Claimed tasks without exactly the recipe's number of finished episodes."""
    unknown_versions: int
    """Versions in claimed episodes that were not committed before the episode was taken."""


def inspect(journal: Journal) -> Inspection:
    """Walks the journal of a run."""
    members: dict[str, list[str]] = {}
    committed: set[int] = set()
    done: set[str] = set()
    unknown: dict[str, int] = {}
    claims: dict[int, list[str]] = {}
    for kind, body in journal:
        if kind == "task_opened":
            members[body["task_id"]] = body["episode_ids"]
        elif kind == "version_committed":
            committed.add(body["version"])
        elif kind == "episode_done":
            done.add(body["episode_id"])
            unknown[body["episode_id"]] = len(set(body["result"]["versions"]) - committed)
        elif kind == "step_claimed":
            claims[body["step"]] = body["task_ids"]  # one that is formed anew replaces it
    claimed = {task for tasks in claims.values() for task in tasks}
    finished = {task: [id_ for id_ in members.get(task, []) if id_ in done] for task in claimed}
    return Inspection(
        claimed_tasks=len(claimed),
        partial_groups=sum(len(set(ids)) != GROUP_SIZE for ids in finished.values()),
        unknown_versions=sum(unknown[id_] for ids in finished.values() for id_ in ids),
    )


class Ended(Protocol):
    """A run that has ended."""

    def fsck(self) -> tuple[bool, dict[str, Any]]:
        """Whether `treadle fsck` holds, and its values by name."""
        ...

    def journal(self) -> Journal:
        """All transitions of its ledger."""
        ...


def account(run: Ended, *, walked: bool = True) -> list[Measure]:
    """What every proof says of a run that has ended; `walked` needs its whole journal."""
    holds, values = run.fsck()
    measures = [
        Measure("fsck_holds", int(holds), "ledgers", "== 1"),
        Measure("lost", values.get("lost", -1), "episodes", "== 0"),
        Measure("trained_twice", values.get("trained_twice", -1), "episodes", "== 0"),
    ]
    if not walked:
        return measures
    found = inspect(run.journal())
    return [
        *measures,
        Measure("claimed_tasks", found.claimed_tasks, "tasks", ">= 1"),
        Measure("partial_groups", found.partial_groups, "groups", "== 0"),
        Measure("unknown_versions", found.unknown_versions, "versions", "== 0"),
    ]
