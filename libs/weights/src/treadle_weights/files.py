"""Versions as safetensors files in a directory: one for each, which outlives its sender.

A file is written aside, fsynced and renamed, so that it is whole or not there. The sender marks
what is committed and keeps the newest two of it; which one is served, the ledger says alone.
"""

import contextlib
import json
import mmap
import os
import re
import time
import uuid
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_core.ids import checked_id
from treadle_weights import arenas, safetensors
from treadle_weights.digests import digest_of, hex_digest
from treadle_weights.layouts import Layout
from treadle_weights.plan import execute
from treadle_weights.transport import (
    Arena,
    ArenaCorruptError,
    ArenaFullError,
    ArenaMissingError,
    LoadOrder,
    Receipt,
    Stored,
)

KEPT = 2
"""Committed versions that are kept, newest first."""

_NAME = re.compile(r"(?P<run>[^.]+)\.(?P<version>[0-9]+)\.safetensors")
_COMMITTED = ".committed"
_DIGESTS = "treadle.digests"


class Files:
    """WeightTransport for processes that see the same directory."""

    def __init__(self, directory: Path | None = None, *, run_dir: Path | None = None) -> None:
        """`directory` exists; left out it is `versions` in the run's directory, and is made.

        Raises InvalidFieldError.
        """
        if directory is None and run_dir is not None:
            directory = run_dir / "versions"
            directory.mkdir(parents=True, exist_ok=True)
        if directory is None:
            raise InvalidFieldError("directory", limit="a directory", value="none")
        self._directory = arenas.checked_directory(directory).resolve()

    def arena(self, run_id: str, version: int, size: int) -> Arena:
        return Arena(str(self._path(run_id, version)), size)

    def alias(self, run_id: str, version: int, base: Arena) -> Arena:
        """A second name of the base's file. A file system without such names has no aliases."""
        path = self._path(run_id, version)
        aside = _aside(path)
        try:
            os.link(_checked_path(base, self._directory), aside, follow_symlinks=False)
            aside.replace(path)
            _sync_directory(self._directory)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise ArenaMissingError(
                f"{base.path}: {error.strerror}", field="arena.path", value=base.path
            ) from error
        # Renaming a name over another name of the same file leaves both.
        aside.unlink(missing_ok=True)
        return Arena(str(path), base.size)

    def find(self, run_id: str, version: int) -> Stored | None:
        path = self._path(run_id, version)
        try:
            header, _ = _opened(path)
        except ArenaMissingError:
            return None
        return Stored(
            Arena(str(path), header.layout.size()), header.layout, digests_of(path, header)
        )

    def sender(self, run_id: str) -> "Sender":
        return Sender(run_id, self._directory)

    def receiver(self) -> "Receiver":
        return Receiver(self._directory)

    def _path(self, run_id: str, version: int) -> Path:
        return self._directory / f"{checked_id('run_id', run_id)}.{version}.safetensors"


class Sender:
    """WeightSender over files in `directory`; one per run at a time."""

    def __init__(self, run_id: str, directory: Path) -> None:
        """Removes what dead senders of the run had not finished."""
        self._run_id = checked_id("run_id", run_id)
        self._directory = directory
        for path in self._directory.glob(f".{self._run_id}.*.part"):
            arenas.remove_if_abandoned(path)

    def send(
        self, arena: Arena, layout: Layout, tensors: Iterable[tuple[str, NDArray[Any]]]
    ) -> dict[str, int]:
        path = _checked_path(arena, self._directory)
        arenas.check_sent(arena, layout)
        stored = safetensors.compact(layout)
        begin = len(header_of(stored, dict.fromkeys(stored.by_tensor, 0)))
        size = max(begin + stored.size(), arena.size)
        with _room_for(path), _whole_or_not(path, size) as descriptor:
            os.ftruncate(descriptor, begin + stored.size())
            mapped = mmap.mmap(descriptor, begin + stored.size())
            data = np.frombuffer(mapped, np.uint8)
            digests = arenas.pack(stored, tensors, data[begin:])
            data[:begin] = np.frombuffer(header_of(stored, digests), np.uint8)
            mapped.flush()
        return {name: digests[name] for name in layout.by_tensor}

    def keep(self, arena: Arena) -> None:
        """Marks the version as committed and deletes all older ones but the newest committed."""
        path = _checked_path(arena, self._directory)
        with _room_for(path):
            _mark(path).touch()
            self._delete_older_than(path)
            _sync_directory(self._directory)

    def _delete_older_than(self, path: Path) -> None:
        present = self._versions()
        marked = sorted(version for version, file in present.items() if _mark(file).exists())
        kept = {path, *(present[version] for version in marked[-KEPT:])}
        for version, file in present.items():
            if version < marked[-1] and file not in kept:
                file.unlink(missing_ok=True)
                _mark(file).unlink(missing_ok=True)

    def discard(self, arena: Arena) -> None:
        path = _checked_path(arena, self._directory)
        if not _mark(path).exists():
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leaves all: a version may be committed whose sender was never told."""

    def _versions(self) -> dict[int, Path]:
        """The run's files by version, and names of those of which a mark alone is left."""
        names = {
            path.name.removesuffix(_COMMITTED)
            for path in self._directory.glob(f"{self._run_id}.*.safetensors*")
        }
        found = {name: _NAME.fullmatch(name) for name in names}
        return {
            int(match["version"]): self._directory / name for name, match in found.items() if match
        }


class Receiver:
    """WeightReceiver over files in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def receive(self, order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]) -> Receipt:
        arenas.check_received(order, target, buffer)
        began_at = time.monotonic()
        path = _checked_path(order.arena, self._directory)
        header, data = _opened(path)
        check_same_tensors(path, header.layout, order.source)
        # The plan's boxes are of whole tensors, and so are the file's.
        places = {name: indices[0] for name, indices in header.layout.by_tensor.items()}
        copies = [
            replace(copy, source=places.get(copy.tensor, -1), source_rank=0)
            for copy in order.copies
        ]
        execute(copies, header.layout, target, data[header.begin :], buffer)
        loaded_at = time.monotonic()
        arenas.verify(order, target, buffer)
        return Receipt(0.0, loaded_at - began_at, time.monotonic() - loaded_at, 0)


def _opened(path: Path) -> tuple[safetensors.Header, NDArray[np.uint8]]:
    """The header, and the bytes of the whole file."""
    data = arenas.mapped(path)
    try:
        return safetensors.decode(data), data
    except safetensors.SafetensorsError as error:
        raise _corrupt(path, error) from error


def _corrupt(path: Path | str, error: TreadleError) -> ArenaCorruptError:
    return ArenaCorruptError(
        f"{path}: {error.message}", field=error.field, limit=error.limit, value=error.value
    )


def header_of(layout: Layout, digests: Mapping[str, int]) -> bytes:
    """The begin of a version's file, as long for all digests."""
    stated = {name: hex_digest(digest) for name, digest in digests.items()}
    return safetensors.encode(layout, {_DIGESTS: json.dumps(stated, sort_keys=True)})


def digests_of(path: Path | str, header: safetensors.Header) -> dict[str, int]:
    """What the sender stated of each tensor."""
    try:
        stated: object = json.loads(header.metadata.get(_DIGESTS, ""))
    except ValueError:
        stated = None
    digests = cast("dict[str, object]", stated) if isinstance(stated, dict) else {}
    try:
        return {name: digest_of(name, digests.get(name)) for name in header.layout.by_tensor}
    except InvalidFieldError as error:
        raise _corrupt(path, error) from error


def check_same_tensors(path: Path | str, found: Layout, source: Layout) -> None:
    """Raises ArenaCorruptError where a file holds other tensors than its order says."""
    for name in found.by_tensor.keys() | source.by_tensor.keys():
        stated, lies = (
            next((layout.rectangles[i] for i in layout.by_tensor.get(name, ())), None)
            for layout in (source, found)
        )
        wanted, got = (
            f"{r.dtype} {list(r.shape)}" if r is not None else "none" for r in (stated, lies)
        )
        if wanted != got:
            raise ArenaCorruptError(
                f"{path}: {name} is {got}, not {wanted}", field=name, limit=wanted, value=got
            )


@contextlib.contextmanager
def _room_for(path: Path) -> Generator[None]:
    """Raises ArenaFullError for a disk that says only at an fsync or a new name that it is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in arenas.FULL:
            raise
        raise ArenaFullError(
            f"{path}: {error.strerror}", field="arena.path", limit="room on its disk", value=path
        ) from error


@contextlib.contextmanager
def _whole_or_not(path: Path, size: int) -> Generator[int]:
    """A new file with room for `size` bytes, which becomes `path` at the end of the block.

    It is durable then. The lock tells it from what a dead sender left.
    """
    aside = _aside(path)
    with arenas.created(aside, size, 0o644) as descriptor:
        yield descriptor
        os.fsync(descriptor)
        aside.replace(path)
        _sync_directory(path.parent)
    os.close(descriptor)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")


def _mark(path: Path) -> Path:
    return path.with_name(path.name + _COMMITTED)


def _checked_path(arena: Arena, directory: Path) -> Path:
    """The arena's path; one outside the directory is refused, whoever named it."""
    path = Path(arena.path)
    if path.parent != directory or not _NAME.fullmatch(path.name):
        limit = f"{directory}/RUN.VERSION.safetensors"
        raise InvalidFieldError("arena.path", limit=limit, value=path)
    return path


def _sync_directory(path: Path) -> None:
    """Makes new names durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
