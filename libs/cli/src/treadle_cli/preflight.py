"""What a run needs of its host, looked at before any process is started."""

import shutil
from pathlib import Path
from tempfile import TemporaryFile

_CHECKPOINT = 3
"""Size of a checkpoint in sizes of its policy: the parameters and two moments of the optimiser."""
_MB = 1e6


def check(directory: Path, model: Path) -> list[str]:
    """Says what the run's directory lacks, a line each; creates it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory) as file:
            file.write(b"\0")
    except OSError as error:
        return [f"run.dir: nothing can be written in {directory}: {error.strerror}"]
    return room(directory, model)


def room(directory: Path, model: Path) -> list[str]:
    """Says what the run's disk lacks, a line; reads only."""
    policy = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    kept = any((directory / "checkpoints").glob("step-*"))
    count = 1 if kept else 2  # one that is kept makes room when the next is committed
    needed, free = count * _CHECKPOINT * policy, shutil.disk_usage(directory).free
    if free >= needed:
        return []
    return [
        f"run.dir: {needed / _MB:.1f} MB are needed in {directory}, {count} x {_CHECKPOINT} x "
        f"{policy / _MB:.1f} MB of run.model for checkpoints; {free / _MB:.1f} MB are free"
    ]
