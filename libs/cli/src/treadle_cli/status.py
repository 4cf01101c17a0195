"""`treadle status RUN`: says how a run does or did, from what lies in its directory."""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from treadle_cli import compose, preflight, record, screen
from treadle_cli.rows import RunTail
from treadle_cli.standing import Standing
from treadle_core.errors import InvalidFieldError
from treadle_runtime.config import BAD_CONFIGURATION
from treadle_runtime.files import is_locked

_MB = 1e6
_WIDTH = 160
"""Characters of a line where no terminal says how many."""


@dataclass(frozen=True, slots=True)
class Status:
    """A run at one moment."""

    directory: Path
    record: dict[str, Any]
    """Of its run.json."""
    standing: Standing
    is_running: bool
    """A `treadle train` holds its lock."""
    alive: frozenset[str]
    """Services whose process is there."""
    checkpoint: Path | None
    """The newest one."""
    disk_bytes: dict[str, int]
    """By what lies in the directory."""
    now: float
    """Unix seconds; of a run that ended, when it said the last thing."""

    @property
    def phase(self) -> str:
        """What it does, or how it ended."""
        if self.is_running or self.standing.ended is not None:
            return self.standing.phase
        return "killed" if self.standing.began else "not started"

    @property
    def lacking(self) -> list[str]:
        """What the machine lacks, a line each."""
        if self.standing.is_complete:
            return []
        return preflight.room(self.directory, Path(self.record["recipe"]["run"]["model"]))

    @property
    def next(self) -> str:
        """What to do now, in a sentence."""
        recipe = shlex.quote(str((self.directory / compose.RECIPE).resolve()))
        home = self.record.get("started_in", ".")
        at = "" if Path(home).resolve() == Path.cwd() else f"cd {shlex.quote(home)} && "
        if self.is_running:
            down = [name for name, each in self.standing.services.items() if not each.is_up]
            logs = ", ".join(str(self.directory / "logs" / f"{name}.log") for name in down)
            return f"Being started again; see {logs}." if down else "It goes on by itself."
        if self.standing.is_complete and not self.standing.steps:
            return "It is complete."
        if self.standing.is_complete:
            model = self.checkpoint.resolve() if self.checkpoint else "FOLDER"
            return f"It is complete. Score it with: {at}treadle eval {recipe} run.model={model}"
        wait = f"Wait for {', '.join(sorted(self.alive))} to end, then go" if self.alive else "Go"
        return f"{wait} on with: {at}treadle train {recipe}"


def main(argv: list[str]) -> int:
    """Says what a run is, whether it runs, how it does, and what to do next. Reads only."""
    parser = argparse.ArgumentParser(prog="treadle status", description=main.__doc__)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    args = parser.parse_args(argv)
    try:
        found = read(args.run)
    except InvalidFieldError as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIGURATION
    if args.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        Console(width=None if sys.stdout.isatty() else _WIDTH).print(as_text(found))
    return 0


def read(directory: Path) -> Status:
    """Raises InvalidFieldError where no run lies."""
    kept = record.read(directory)
    standing = Standing(kept["recipe"]["experience"]["steps"])
    for writer, row in RunTail(directory).rows():
        standing.fold(writer, row)
    is_running = is_locked(directory / "lock")
    return Status(
        directory,
        kept,
        standing,
        is_running,
        frozenset(n for n, each in standing.services.items() if _is_alive(n, each.pid)),
        _checkpoint(directory),
        {path.name: _size(path) for path in sorted(directory.iterdir())},
        time.time() if is_running else standing.time,
    )


def as_text(status: Status) -> screen.RenderableType:
    """The screen of `treadle train`, and what lies on the disk."""
    total = sum(status.disk_bytes.values())
    most = sorted(status.disk_bytes.items(), key=lambda pair: -pair[1])[:3]
    parts = ", ".join(f"{name} {size / _MB:.1f}" for name, size in most)
    facts = {
        "model": status.record["recipe"]["run"]["model"],
        "checkpoint": str(status.checkpoint or "none"),
        "durability": status.standing.durability or "not known yet",
        "disk": f"{total / _MB:.1f} MB ({parts}), {_free(status.directory) / _MB:.0f} MB free",
    }
    if status.alive:
        pids = {name: status.standing.services[name].pid for name in sorted(status.alive)}
        facts["processes"] = ", ".join(f"{name} {pid}" for name, pid in pids.items())
    facts["next"] = status.next
    beside = screen.Beside(
        status.record["id"],
        str(status.directory),
        status.phase,
        status.lacking,
        facts=facts,
        is_running=status.is_running,
    )
    return screen.render(status.standing, beside, status.now)


def as_json(status: Status) -> dict[str, Any]:
    """The same for programs; what there is not is null."""
    standing = status.standing
    step, engine = standing.last_step, standing.engine
    return {
        "run": status.record["id"],
        "directory": str(status.directory),
        "model": status.record["recipe"]["run"]["model"],
        "phase": status.phase,
        "running": status.is_running,
        "step": standing.step,
        "steps": standing.steps,
        "left_s": standing.left_s(status.now) if status.is_running else None,
        "reward": step.get("reward"),
        "scores": {name: asdict(scores[-1]) for name, scores in standing.scores.items()},
        "lag_mean": step.get("lag_mean"),
        "lag_max": step.get("lag_max"),
        "sampled_tokens_per_s": engine.get("tokens_per_s"),
        "trained_tokens_per_s": step.get("tokens_per_s"),
        "waits": standing.waits,
        "durability": standing.durability or None,
        "services": {
            name: {
                "pid": each.pid,
                "alive": name in status.alive,
                "deaths": each.deaths,
                "last_line": each.last_death.get("last_line"),
            }
            for name, each in standing.services.items()
        },
        "warnings": [*status.lacking, *standing.warnings().values()],
        "disk_bytes": status.disk_bytes,
        "free_bytes": _free(status.directory),
        "checkpoint": str(status.checkpoint) if status.checkpoint else None,
        "next": status.next,
    }


def _is_alive(service: str, pid: int) -> bool:
    """Whether the process is there, and is that service still."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return f"treadle_{service}.main".encode() in words


def _checkpoint(directory: Path) -> Path | None:
    return max((directory / "checkpoints").glob("step-*"), default=None)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; what goes away meanwhile has none."""
    found = [path] if path.is_file() else [Path(at) / n for at, _, ns in os.walk(path) for n in ns]
    total = 0
    for file in found:
        try:
            total += file.lstat().st_size
        except FileNotFoundError:
            continue
    return total


def _free(directory: Path) -> int:
    return shutil.disk_usage(directory).free
