"""Where the unix sockets of a run lie."""

import contextlib
import hashlib
import shutil
from pathlib import Path

_PATH_LIMIT = 90
"""A unix socket's path may hold 107 bytes; the lock beside it needs a few more."""
_LONGEST_NAME = len("experience.sock")


def short_folder(run_dir: Path, name: str = "") -> Path:
    """A folder with a short path that is the run's alone; who makes it removes it."""
    digest = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:12]
    return Path("/tmp") / f"treadle-{digest}{name and f'-{name}'}"  # noqa: S108, short on purpose


def folder(run_dir: Path) -> Path:
    """The folder of a run's sockets: its own, or where their paths would be too long another."""
    run_dir = run_dir.resolve()
    inside = run_dir / "sockets"
    if len(str(inside)) + 1 + _LONGEST_NAME > _PATH_LIMIT:
        return short_folder(run_dir)
    return inside


def path(run_dir: Path, name: str) -> Path:
    """The socket of the process `name` of a run."""
    return folder(run_dir) / f"{name}.sock"


def remove_if_empty(run_dir: Path) -> None:
    """Removes such a folder where nobody has a socket in it."""
    if folder(run_dir).parent != run_dir.resolve():
        with contextlib.suppress(OSError):
            folder(run_dir).rmdir()


def remove(run_dir: Path) -> None:
    """Removes a folder of sockets that lies elsewhere: nobody would find it with the run."""
    if folder(run_dir).parent != run_dir.resolve():
        shutil.rmtree(folder(run_dir), ignore_errors=True)
