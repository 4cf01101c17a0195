"""Drives `treadle` as a user does, in a directory of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle_cli.rows import written

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 240.0
"""A short run takes ten seconds where nobody else uses the two cores, and minutes where they do."""
RECIPE = "recipes/calculator.yaml"
SMALL = (
    "experience.steps=6",
    "experience.tasks_per_step=4",
    "experience.group_size=4",
    "experience.evaluation.every=3",
    "experience.lease_s=3",
    "rollout.slots=16",
    "trainer.checkpoint_every=2",
)
"""Makes the demo's recipe a matter of seconds."""


def python(*words: str, cwd: Path = ROOT, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs `python WORDS` to its end; fails where that is not `status`."""
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def treadle(*words: str, cwd: Path = ROOT, status: int = 0) -> "subprocess.CompletedProcess[str]":
    """Runs `treadle WORDS` likewise."""
    return python("-m", "treadle_cli.main", *words, cwd=cwd, status=status)


def measures(printed: str) -> dict[str, Any]:
    """Values of the measures that were printed, by name; fails where one does not hold."""
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row for row in rows if not row["holds"]] == []
    return {row["measure"]: row["value"] for row in rows}


class Run:
    """One run directory, and the `treadle train` that works on it."""

    def __init__(self, directory: Path, *overrides: str, recipe: str = RECIPE) -> None:
        self.directory = directory
        self._recipe = recipe
        self._overrides = overrides
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> "subprocess.Popen[str]":
        """Starts (or goes on with) the run."""
        command = [
            sys.executable,
            "-m",
            "treadle_cli.main",
            "train",
            self._recipe,
            f"run.dir={self.directory}",
            *self._overrides,
        ]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return self._process

    def finish(self, *, timeout_s: float = PATIENCE_S) -> str:
        """Waits for the end; returns what was printed. Fails where the status is not 0."""
        assert self._process is not None
        out, _ = self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0, out + self.logs()
        return out

    def rows(self, service: str, name: str) -> list[dict[str, Any]]:
        """Rows of one kind that a service has written to its metrics."""
        return written(self.directory, service, name)

    def wait_until(self, holds: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> None:
        """Looks until something holds; fails when the command ends before, or time is up."""
        assert self._process is not None
        give_up = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < give_up, "time is up\n" + self.logs()
            if self._process.poll() is not None:
                raise AssertionError(f"ended early:\n{self._process.stdout.read()}{self.logs()}")
            time.sleep(0.02)

    def service_pids(self) -> dict[str, int]:
        """Live service processes of this run, by name."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            match = re.search(r"treadle_(\w+)\.(?:main|sidecar)\0--config\0([^\0]+)", words)
            if match and Path(match[2]).resolve().is_relative_to(self.directory.resolve()):
                found[match[1]] = int(entry.name)
        return found

    def kill_all(self) -> None:
        """SIGKILLs the command and every service, whatever state they are in."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        for pid in self.service_pids().values():
            os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.communicate()

    def wait_until_no_service_is_left(self, *, timeout_s: float = PATIENCE_S) -> None:
        """Returns once all services have ended by themselves."""
        give_up = time.monotonic() + timeout_s
        while left := self.service_pids():
            assert time.monotonic() < give_up, f"still alive: {left}\n{self.logs()}"
            time.sleep(0.05)

    def fsck(self) -> dict[str, Any]:
        """Measures of `treadle fsck`, by name; fails where one does not hold."""
        return measures(treadle("fsck", str(self.directory)).stdout)

    def log(self, service: str) -> str:
        """All that a service has logged."""
        return (self.directory / "logs" / f"{service}.log").read_text(errors="replace")

    def logs(self) -> str:
        """The end of every service's log."""
        parts = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted((self.directory / "logs").glob("*.log"))
        ]
        return "\n".join(parts)


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs whose processes are gone when the test is."""
    runs: list[Run] = []

    def make(*overrides: str, recipe: str = RECIPE) -> Run:
        small = SMALL if recipe == RECIPE else ()
        run = Run(tmp_path / f"run{len(runs)}", *small, *overrides, recipe=recipe)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.kill_all()
