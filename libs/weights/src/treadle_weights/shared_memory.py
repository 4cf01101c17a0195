"""WeightTransport `shared_memory`: one file on a memory file system per version.

The sender holds a lock on each of its arenas for as long as it lives; the kernel drops the lock
with the process, so an arena without one has lost its sender.
"""

import mmap
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_core.ids import checked_id
from treadle_weights import arenas
from treadle_weights.layouts import Layout
from treadle_weights.plan import execute
from treadle_weights.transport import (
    Arena,
    ArenaCorruptError,
    ArenaHeldError,
    ArenaMissingError,
    LoadOrder,
    Receipt,
    Stored,
)

_ABANDONED_AFTER_S = 600.0
"""A run that is killed and not started again must not hold memory until the host restarts."""

DIRECTORY = "/dev/shm"  # noqa: S108 - a memory file system, and files are created exclusively


class SharedMemory:
    """WeightTransport plugin `shared_memory`, for processes that see the same directory."""

    def __init__(self, directory: str | Path = DIRECTORY, *, run_dir: Path | None = None) -> None:
        """Raises InvalidFieldError where `directory` is none. `run_dir` makes no difference."""
        self._directory = arenas.checked_directory(directory)

    def arena(self, run_id: str, version: int, size: int) -> Arena:
        checked_id("run_id", run_id)
        return Arena(str(self._directory / f"{_prefix(run_id)}{version}"), size)

    def alias(self, run_id: str, version: int, base: Arena) -> Arena:
        path = _checked_path(base, self._directory)
        if not path.is_file():
            raise ArenaMissingError(f"{path}: no such arena", field="arena.path", value=path)
        return base

    def find(self, run_id: str, version: int) -> Stored | None:
        """None: an arena does not outlive its sender for long, and states no digests."""
        return None

    def sender(self, run_id: str) -> "Sender":
        return Sender(run_id, self._directory)

    def receiver(self) -> "Receiver":
        return Receiver(self._directory)


@dataclass(slots=True)
class _Held:
    """An arena that this sender holds: its lock and its bytes."""

    descriptor: int
    data: NDArray[np.uint8]


class Sender:
    """WeightSender over files in `directory`; one per run at a time."""

    def __init__(self, run_id: str, directory: Path) -> None:
        """Releases what dead senders of the run left, and long dead ones of other runs."""
        self._directory = directory
        self._held: dict[Path, _Held] = {}
        mine = _prefix(checked_id("run_id", run_id))
        for path in self._directory.glob("treadle.*"):
            after_s = 0.0 if path.name.startswith(mine) else _ABANDONED_AFTER_S
            arenas.remove_if_abandoned(path, after_s)

    def send(
        self, arena: Arena, layout: Layout, tensors: Iterable[tuple[str, NDArray[Any]]]
    ) -> dict[str, int]:
        path = _checked_path(arena, self._directory)
        arenas.check_sent(arena, layout)
        if path not in self._held:
            self._held[path] = _create(path, arena.size)
        return arenas.pack(layout, tensors, self._held[path].data)

    def keep(self, arena: Arena) -> None:
        for path in [path for path in self._held if path != Path(arena.path)]:
            self._release(path)

    def discard(self, arena: Arena) -> None:
        self._release(Path(arena.path))

    def close(self) -> None:
        for path in list(self._held):
            self._release(path)

    def _release(self, path: Path) -> None:
        """Unlinks the arena; receivers that mapped it before can read on."""
        held = self._held.pop(path, None)
        if held is not None:
            path.unlink(missing_ok=True)
            os.close(held.descriptor)


class Receiver:
    """WeightReceiver over files in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def receive(self, order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]) -> Receipt:
        arenas.check_received(order, target, buffer)
        began_at = time.monotonic()
        execute(order.copies, order.source, target, self._bytes_of(order.arena), buffer)
        loaded_at = time.monotonic()
        arenas.verify(order, target, buffer)
        return Receipt(0.0, loaded_at - began_at, time.monotonic() - loaded_at, 0)

    def _bytes_of(self, arena: Arena) -> NDArray[np.uint8]:
        path = _checked_path(arena, self._directory)
        data = arenas.mapped(path)
        if data.size != arena.size or not data.size:
            raise ArenaCorruptError(
                f"{path}: expected {arena.size} bytes, got {data.size}",
                field="arena.size",
                limit=arena.size,
                value=data.size,
            )
        return data


def _prefix(run_id: str) -> str:
    """Run ids hold no dot, so no run's prefix is another's."""
    return f"treadle.{run_id}."


def _checked_path(arena: Arena, directory: Path) -> Path:
    """The arena's path; one outside the directory is refused, whoever named it."""
    path = Path(arena.path)
    if path.parent != directory or not path.name.startswith("treadle."):
        raise InvalidFieldError("arena.path", limit=f"{directory}/treadle.*", value=path)
    return path


def _create(path: Path, size: int) -> _Held:
    """A new arena of `size` bytes, locked, with its memory reserved."""
    if size < 1:
        raise InvalidFieldError("arena.size", limit=">= 1", value=size)
    arenas.remove_if_abandoned(path)
    try:
        with arenas.created(path, size, 0o600) as descriptor:
            return _Held(descriptor, np.frombuffer(mmap.mmap(descriptor, size), np.uint8))
    except FileExistsError as error:
        raise ArenaHeldError(
            f"{path}: held by another sender", field="arena.path", value=path
        ) from error
