"""The services of one run as bare processes, which die when told to and come back at once."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treadle_cli import compose
from treadle_cli.rows import written
from treadle_runtime.config import merge, parse_overrides, read_yaml
from treadle_runtime.local_servers import known

ROOT = Path(__file__).parent.parent.parent
VICTIMS = ("trainer", "experience")
"""They die in turn."""
END_S = 300.0
"""Most seconds that a run may take."""
_LOOK_S = 0.02


class ServiceEndedError(AssertionError):
    """Services ended by themselves, and not because the run was over."""

    def __init__(self, statuses: dict[str, int], logs: str) -> None:
        super().__init__(f"ended by themselves: {statuses}\n{logs}")
        self.statuses = statuses
        """Exit status of each, by name."""


class Lives:
    """Runs a recipe to its end in a directory of its own, over as many lives as it takes."""

    def __init__(self, directory: Path, recipe: str, *overrides: str) -> None:
        """Composes what each service is told; starts nothing."""
        self.directory = directory
        values = read_yaml(ROOT / recipe)
        merge(values, parse_overrides([f"run.dir={directory}", *overrides]))
        plan = compose.compose(values)
        self._configs = compose.write(plan, values)
        self._servers = plan.servers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._give_up = 0.0
        self.kills = 0

    def run(self, *, kills: int = 0, seed: int = 0) -> None:
        """Starts the run's own servers, and plays it."""
        with contextlib.ExitStack() as served:
            for server in self._servers:
                served.enter_context(known.running(self.directory, server.address))
            self._run(kills, seed)

    def _run(self, kills: int, seed: int) -> None:
        """Plays the run to its end; processes are killed at moments that the seed draws.

        Raises ServiceEndedError where a service ends by itself with another status than 0, and
        fails when time is up.
        """
        self._give_up = time.monotonic() + END_S
        chance = random.Random(seed)  # noqa: S311, moments
        try:
            for name in self._configs:
                self._start(name)
            for number in range(kills):
                rows = len(self.rows()) + chance.randint(1, 3)
                if self._wait(lambda rows=rows: len(self.rows()) >= rows):
                    break
                # Any moment will do: this is no waiting for anything.
                time.sleep(chance.uniform(0.0, 0.3))
                self._kill(VICTIMS[number % len(VICTIMS)])
            self._wait(lambda: False)
        finally:
            self._end()

    def die_at(self, rows: int) -> None:
        """Starts, and kills all services once the trainer has taken so many steps."""
        self._give_up = time.monotonic() + END_S
        try:
            for name in self._configs:
                self._start(name)
            assert not self._wait(lambda: len(self.rows()) >= rows), "the end came first"
        finally:
            for process in self._processes.values():
                process.kill()
                process.wait()

    def rows(self, name: str = "step") -> list[dict[str, Any]]:
        """Rows of one kind that the trainer wrote, over all its lives."""
        return written(self.directory, "trainer", name)

    def logs(self) -> str:
        """The end of every service's log."""
        paths = sorted((self.directory / "logs").glob("*.log"))
        return "\n".join(f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in paths)

    def _start(self, name: str) -> None:
        command = [sys.executable, "-m", f"treadle_{name}.main", "--config", self._configs[name]]
        with (self.directory / "logs" / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )

    def _kill(self, name: str) -> None:
        process = self._processes[name]
        if process.poll() is None:
            process.kill()
            process.wait()
            self.kills += 1
            self._start(name)

    def _wait(self, holds: Callable[[], bool]) -> bool:
        """Looks until something holds; True where the run's end came first."""
        while not self._is_complete():
            if holds():
                return False
            if time.monotonic() > self._give_up:
                raise AssertionError(f"time is up\n{self.logs()}")
            time.sleep(_LOOK_S)
        return True

    def _is_complete(self) -> bool:
        status = {name: process.poll() for name, process in self._processes.items()}
        failed = {name: code for name, code in status.items() if code}
        if failed:
            raise ServiceEndedError(failed, self.logs())
        return status["trainer"] == 0 and status["rollout"] == 0

    def _end(self) -> None:
        """Ends what is left, in the order in which services drain."""
        for name in ("rollout", "trainer", "refit", "experience"):
            process = self._processes.get(name)
            if process is None or process.poll() is not None:
                continue
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def scripted(steps: int) -> Sequence[str]:
    """Overrides of the scripted recipe: so many steps, and now and then a task that is no good."""
    backend = "{name: 'tests/resume/poison.py:Poisoned'}"
    return f"experience.steps={steps}", f"trainer.backend={backend}"


def small(steps: int) -> Sequence[str]:
    """Overrides that make a real recipe a matter of seconds, and a kill cost it steps."""
    return (
        f"experience.steps={steps}",
        "experience.tasks_per_step=4",
        "experience.group_size=4",
        "experience.retries=100",
        "experience.lease_s=3",
        "experience.evaluation=null",
        "rollout.slots=16",
        "trainer.checkpoint_every=6",
    )
