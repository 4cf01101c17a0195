"""A trainer that dies at any moment of a checkpoint, and what the next one must find.

The writer runs in a child process that ends before one of its operations on files; each run ends
one operation later, until one comes to its end. Nothing of the store is replaced.
"""

import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ledger_model.oracle import BreachError, require
from treadle_trainer.adapters.local_checkpoints import LATEST, MANIFEST, LocalCheckpoints
from treadle_trainer.ports import Checkpoint, CheckpointCorruptError

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir"}
SIZE = 4096
BREACHES = (BreachError, CheckpointCorruptError)
"""What `survive` raises where a promise is broken."""

_NAMED = re.compile(r"step-\d+(\.\d+)?")
_DIED = 17
_MOST = 500


@dataclass
class Moments:
    """Ends this process before its operation `last` on files below a directory."""

    directory: Path
    last: int
    armed: bool = True
    seen: int = field(default=0, init=False)

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if self.armed and event in OPERATIONS and str(args[0]).startswith(str(self.directory)):
            self.seen += 1
            if self.seen == self.last:
                os._exit(_DIED)


def survive(work: Callable[[Path], None], check: Callable[[Path], None]) -> int:
    """Lets `work` die at each of its moments in turn; returns how many there were."""
    for moment in range(1, _MOST):
        with tempfile.TemporaryDirectory(prefix="treadle-model-") as name:
            directory = Path(name) / "checkpoints"
            store = LocalCheckpoints(directory)
            write(store, 1)
            store.mark_latest(checkpoint_of(directory / "step-000001", 1))
            if _die_at(moment, directory, work):
                check(directory)
            else:
                return moment - 1
    raise AssertionError("the work never ends")


def write(store: LocalCheckpoints, step: int) -> None:
    """A checkpoint of a few files, the largest in two halves."""

    def fill(folder: Path) -> None:
        (folder / "state.json").write_text(f'{{"step": {step}}}')
        half = hashlib.sha256(str(step).encode()).digest() * (SIZE // 32)
        with (folder / "model.safetensors").open("wb") as file:
            file.write(half)
            file.flush()
            os.listdir(folder)  # noqa: PTH208 - a moment at which half a file is there
            file.write(half)

    store.write(step, fill)


def write_next(directory: Path) -> None:
    """What a trainer does to commit step 2, but for the ledger."""
    write(LocalCheckpoints(directory), 2)


def finish_next(directory: Path) -> None:
    """What it does once the ledger has committed step 2."""
    store = LocalCheckpoints(directory)
    write(store, 2)
    store.mark_latest(checkpoint_of(directory / "step-000002", 2))
    store.retain([checkpoint_of(directory / "step-000002", 2)])


def check_named(directory: Path) -> None:
    """A folder that has a checkpoint's name is whole, and the next trainer can go on."""
    store = LocalCheckpoints(directory)
    for folder in sorted(directory.iterdir()):
        if _NAMED.fullmatch(folder.name):
            require((folder / MANIFEST).is_file(), "a named checkpoint is whole (I10)", folder.name)
            store.open(checkpoint_of(folder, int(folder.name[5:11])))
    store.open(checkpoint_of(directory / "step-000001", 1))
    store.remove_leftovers()
    write(store, 2)
    left = [path.name for path in directory.iterdir() if path.name.startswith(".aside")]
    require(not left, "what a crash left is removed", left)


def check_retained(directory: Path) -> None:
    """`latest` names a whole checkpoint at every moment, and never an older one than before."""
    name = (directory / LATEST).read_text().strip()
    LocalCheckpoints(directory).open(checkpoint_of(directory / name, int(name[5:11])))
    require(name in ("step-000001", "step-000002"), "latest is a checkpoint", name)


def checkpoint_of(folder: Path, step: int) -> Checkpoint:
    """The checkpoint that a ledger would have recorded for a folder."""
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    return Checkpoint(digest, "", step, f"checkpoints/{folder.name}")


def _die_at(moment: int, directory: Path, work: Callable[[Path], None]) -> bool:
    """Whether the child died; False when its work ended before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            sys.addaudithook(Moments(directory, moment))
            work(directory)
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    require(status in (0, _DIED), "the writer ends as planned", status)
    return status == _DIED
