"""CheckpointStore `local`: one folder a checkpoint, below one directory."""

import contextlib
import errno
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError

from treadle_core.errors import InvalidFieldError
from treadle_runtime.failpoints import failpoint
from treadle_runtime.files import write_durably
from treadle_trainer.adapters import folders
from treadle_trainer.ports import (
    Checkpoint,
    CheckpointCorruptError,
    CheckpointStoreFullError,
    StoredCheckpoint,
)

MANIFEST = "manifest.json"
LATEST = "latest"
_FORMAT = 1
_NAME = re.compile(r"step-\d{6,}(\.\d+)?")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_PICKLED = {".bin", ".ckpt", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
"""Suffixes of files that run code when they are read; tensors are safetensors here."""
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""All that safetensors says of the number of an error of the operating system."""
_MANIFEST_LIMIT = 1 << 20
"""Bytes; a manifest has a line a file."""


class LocalCheckpoints:
    """CheckpointStore on a local directory: `step-000010/` with a manifest of its files.

    A folder is complete and durable from the moment at which it has its name. One that no ledger
    knows is harmless: it is deleted with a later `retain`.

    A trainer that stood still while its successor took over may go on at any line here. So it
    replaces nothing, and deletes only what was there before: leftovers from before it was made,
    and folders from before its last `write`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._leftovers = folders.leftovers(directory)
        self._before: dict[str, int] = {}
        """Inode of each folder that was there at the last `write`, by name."""

    def write(self, step: int, fill: Callable[[Path], None]) -> StoredCheckpoint:
        self._before = {path.name: path.stat().st_ino for path in self._checkpoints()}
        room = self._room_for(f"checkpoint of step {step}")
        with room, folders.aside(self._directory) as folder:
            fill(folder)
            failpoint("trainer.checkpoint.before_manifest")
            manifest = _manifest_of(folder, step)
            (folder / MANIFEST).write_bytes(manifest)
            failpoint("trainer.checkpoint.after_manifest")
            target = folders.install_as_new(folder, self._names(step))
        path = f"{self._directory.name}/{target.name}"
        return StoredCheckpoint(hashlib.sha256(manifest).hexdigest(), path)

    def open(self, checkpoint: Checkpoint) -> Path:
        folder = self._folder(checkpoint)
        if folder.is_symlink() or not folder.is_dir():
            raise _corrupt(checkpoint, "folder", "a directory", "none")
        size = _size_of(checkpoint, folder / MANIFEST)
        if size > _MANIFEST_LIMIT:
            raise _corrupt(checkpoint, MANIFEST, f"<= {_MANIFEST_LIMIT} bytes", size)
        manifest = (folder / MANIFEST).read_bytes()
        found = hashlib.sha256(manifest).hexdigest()
        if found != checkpoint.digest:
            raise _corrupt(checkpoint, MANIFEST, f"sha256 {checkpoint.digest}", found)
        files = _files_in(checkpoint, manifest)
        present = {path.name for path in folder.iterdir()} - {MANIFEST}
        if present != set(files):
            odd = sorted(present ^ set(files))
            raise _corrupt(checkpoint, odd[0], "exactly the manifest's files", odd[:10])
        for name, entry in files.items():
            _check_file(checkpoint, folder / name, entry)
        return folder

    def mark_latest(self, checkpoint: Checkpoint) -> None:
        name = self._folder(checkpoint).name
        with self._room_for(LATEST):
            write_durably(self._directory / LATEST, f"{name}\n".encode())

    def retain(self, checkpoints: Sequence[Checkpoint]) -> None:
        kept = {self._folder(checkpoint).name for checkpoint in checkpoints}
        for path in self._checkpoints():
            if path.name not in kept and self._before.get(path.name) == path.stat().st_ino:
                shutil.rmtree(path, ignore_errors=True)

    def remove_leftovers(self) -> Sequence[str]:
        left = [name for name in self._leftovers if (self._directory / name).exists()]
        for name in left:
            shutil.rmtree(self._directory / name, ignore_errors=True)
        return left

    def _checkpoints(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if _NAME.fullmatch(path.name)]

    @contextlib.contextmanager
    def _room_for(self, what: str) -> Generator[None]:
        """Raises CheckpointStoreFullError where the disk has no room."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            if _number_of(error) not in _FULL:
                raise
            raise CheckpointStoreFullError(
                f"{what}: {error}",
                field="checkpoints",
                limit="room on the disk",
                value=str(self._directory),
            ) from error

    def _folder(self, checkpoint: Checkpoint) -> Path:
        parent, _, name = checkpoint.path.rpartition("/")
        if parent != self._directory.name or not _NAME.fullmatch(name):
            limit = f"{self._directory.name}/step-NNNNNN"
            raise _corrupt(checkpoint, "path", limit, checkpoint.path)
        return self._directory / name

    def _names(self, step: int) -> Iterator[Path]:
        """The step's name; numbered where a checkpoint outside the lineage still has it."""
        name = f"step-{step:06d}"
        yield self._directory / name
        for number in itertools.count(1):
            yield self._directory / f"{name}.{number}"


def _number_of(error: Exception) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1]) if found else None


def _manifest_of(folder: Path, step: int) -> bytes:
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLED)
    if pickled:
        raise InvalidFieldError("checkpoint", limit="safetensors and JSON", value=pickled[0])
    files = {
        path.name: {"sha256": _sha256(path), "size": path.stat().st_size}
        for path in sorted(folder.iterdir())
    }
    content = {"format": _FORMAT, "step": step, "files": files}
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def _files_in(checkpoint: Checkpoint, manifest: bytes) -> dict[str, dict[str, Any]]:
    """The file entries of a manifest whose digest is right."""
    content = cast("dict[str, Any]", json.loads(manifest))
    if content["format"] != _FORMAT:
        raise _corrupt(checkpoint, f"{MANIFEST}.format", _FORMAT, content["format"])
    if content["step"] != checkpoint.step:
        raise _corrupt(checkpoint, f"{MANIFEST}.step", checkpoint.step, content["step"])
    files = cast("dict[str, dict[str, Any]]", content["files"])
    for name in files:
        if not _FILE.fullmatch(name) or name == MANIFEST:
            raise _corrupt(checkpoint, f"{MANIFEST}.files", _FILE.pattern, repr(name[:80]))
        if Path(name).suffix in _PICKLED:
            raise _corrupt(checkpoint, f"{MANIFEST}.files", "safetensors and JSON", name)
    return files


def _check_file(checkpoint: Checkpoint, path: Path, entry: dict[str, Any]) -> None:
    size = _size_of(checkpoint, path)
    if size != entry["size"]:
        raise _corrupt(checkpoint, path.name, f"{entry['size']} bytes", size)
    found = _sha256(path)
    if found != entry["sha256"]:
        raise _corrupt(checkpoint, path.name, f"sha256 {entry['sha256']}", found)


def _size_of(checkpoint: Checkpoint, path: Path) -> int:
    if path.is_symlink() or not path.is_file():
        raise _corrupt(checkpoint, path.name, "a regular file", "none")
    return path.stat().st_size


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _corrupt(
    checkpoint: Checkpoint, name: str, limit: object, value: object
) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"checkpoint {checkpoint.path}: {name}: expected {limit}, got {value}",
        field=name,
        limit=limit,
        value=value,
    )
