"""Versions as safetensors files under any URL that fsspec knows: object stores, HDFS, SFTP, ...

The same files as in a directory, read by ranges and written in one piece: a file becomes visible
when it is whole. What a store does not promise (a name that appears only then, a second name of one
file) is not asked of it: a file of another length than it states is no version, and an alias is a
small file that names its base.
"""

import re
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_core.ids import checked_id
from treadle_weights import arenas, safetensors
from treadle_weights.buckets import packed, pieces, place
from treadle_weights.files import KEPT, check_same_tensors, digests_of, header_of
from treadle_weights.layouts import Layout
from treadle_weights.transport import (
    Arena,
    ArenaCorruptError,
    ArenaFullError,
    ArenaMissingError,
    LoadOrder,
    Receipt,
    Stored,
)

RANGE_BYTES = 32 * 2**20
"""Bytes of one read."""

_GUESS = 1 << 16
"""Bytes read first: most headers are shorter."""
_ALIAS, _COMMITTED = ".alias", ".committed"
_NAME = re.compile(r"(?P<run>[^./]+)\.(?P<version>[0-9]{1,10})\.safetensors")


class FileSystem(Protocol):
    """What of an fsspec file system is used. Paths are without the protocol."""

    def open(self, path: str, mode: str, *, autocommit: bool) -> Any: ...
    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def pipe_file(self, path: str, value: bytes) -> None: ...
    def size(self, path: str) -> int: ...
    def exists(self, path: str) -> bool: ...
    def ls(self, path: str, *, detail: bool) -> list[str]: ...
    def rm_file(self, path: str) -> None: ...
    def makedirs(self, path: str, *, exist_ok: bool) -> None: ...
    def invalidate_cache(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A URL that ends in a folder, and what reads and writes there."""

    url: str
    """Without a slash at its end."""
    system: FileSystem
    root: str
    """The folder as the file system names it."""

    def arena(self, run_id: str, version: int, size: int) -> Arena:
        name = f"{checked_id('run_id', run_id)}.{version}.safetensors"
        return Arena(f"{self.url}/{name}", size)

    def path(self, arena: Arena) -> str:
        """Where the file system has the arena; raises InvalidFieldError for one elsewhere."""
        folder, _, name = arena.path.rpartition("/")
        if folder != self.url or not _NAME.fullmatch(name):
            limit = f"{self.url}/RUN.VERSION.safetensors"
            raise InvalidFieldError("arena.path", limit=limit, value=arena.path[:200])
        return f"{self.root}/{name}"

    def target(self, arena: Arena) -> str:
        """The path of the bytes: of an alias, those of its base."""
        path = self.path(arena)
        try:
            base = self.system.cat_file(path + _ALIAS).decode()
        except FileNotFoundError:
            return path
        return self.path(Arena(f"{self.url}/{base}", 0))


def folder_of(url: str, options: dict[str, Any]) -> Folder:
    """Opens the file system of a URL; raises InvalidFieldError where there is none."""
    try:
        import fsspec  # noqa: PLC0415 - only who names a URL needs it
    except ImportError as error:
        raise InvalidFieldError("url", limit="with fsspec installed", value=url) from error
    url = url.rstrip("/")
    if "://" not in url:
        raise InvalidFieldError("url", limit="PROTOCOL://...", value=url[:200])
    try:
        found = cast("tuple[FileSystem, str]", fsspec.url_to_fs(url, **options))
    except (ValueError, ImportError, TypeError) as error:
        raise InvalidFieldError("url", limit="one that fsspec opens", value=error) from error
    system, root = found
    return Folder(url, system, root.rstrip("/"))


class UrlFiles:
    """WeightTransport over the files of a Folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def arena(self, run_id: str, version: int, size: int) -> Arena:
        return self._folder.arena(run_id, version, size)

    def alias(self, run_id: str, version: int, base: Arena) -> Arena:
        """Writes a file that names the base's."""
        target = self._folder.target(base)
        if not self._folder.system.exists(target):
            raise ArenaMissingError(f"{base.path}: gone", field="arena.path", value=base.path)
        arena = self._folder.arena(run_id, version, base.size)
        name = target.rpartition("/")[2]
        self._folder.system.pipe_file(self._folder.path(arena) + _ALIAS, name.encode())
        return arena

    def find(self, run_id: str, version: int) -> Stored | None:
        arena = self._folder.arena(run_id, version, 0)
        self._folder.system.invalidate_cache()
        try:
            header = _opened(self._folder, arena)[0]
        except ArenaMissingError:
            return None
        stated = digests_of(arena.path, header)
        return Stored(replace(arena, size=header.layout.size()), header.layout, stated)

    def sender(self, run_id: str) -> "Sender":
        return Sender(run_id, self._folder)

    def receiver(self) -> "Receiver":
        return Receiver(self._folder)


class Sender:
    """WeightSender to a Folder; one per run at a time."""

    def __init__(self, run_id: str, folder: Folder) -> None:
        self._run_id = checked_id("run_id", run_id)
        self._folder = folder
        folder.system.makedirs(folder.root, exist_ok=True)

    def send(
        self, arena: Arena, layout: Layout, tensors: Iterable[tuple[str, NDArray[Any]]]
    ) -> dict[str, int]:
        path = self._folder.path(arena)
        arenas.check_sent(arena, layout)
        stored = safetensors.compact(layout)
        try:
            data = np.empty(stored.size(), np.uint8)
        except (MemoryError, ValueError) as error:
            raise ArenaFullError(
                f"{path}: no memory", field="arena.size", limit="free memory", value=arena.size
            ) from error
        digests = arenas.pack(stored, tensors, data)
        with _room_for(path), self._whole_or_not(path) as file:
            file.write(header_of(stored, digests))
            for bucket in packed(data.size, RANGE_BYTES):
                file.write(data[bucket.start : bucket.stop].data)
        return {name: digests[name] for name in layout.by_tensor}

    def keep(self, arena: Arena) -> None:
        """Marks the version as committed and deletes all older ones but the newest committed."""
        path = self._folder.path(arena)
        with _room_for(path):
            self._folder.system.pipe_file(path + _COMMITTED, b"")
        self._delete_older_than(path)

    def discard(self, arena: Arena) -> None:
        path = self._folder.path(arena)
        if not self._folder.system.exists(path + _COMMITTED):
            self._delete(path)

    def close(self) -> None:
        """Leaves all: a version may be committed whose sender was never told."""

    def _delete_older_than(self, path: str) -> None:
        system = self._folder.system
        system.invalidate_cache()
        names = {name.rpartition("/")[2] for name in system.ls(self._folder.root, detail=False)}
        present = {
            int(match["version"]): match[0]
            for name in names
            if (match := _NAME.match(name)) and match["run"] == self._run_id
        }
        marked = sorted(v for v, name in present.items() if name + _COMMITTED in names)
        kept = {path, *(f"{self._folder.root}/{present[version]}" for version in marked[-KEPT:])}
        # A base stays as long as one of its aliases.
        kept |= {
            self._folder.target(Arena(f"{self._folder.url}/{each.rpartition('/')[2]}", 0))
            for each in kept
        }
        for version, name in present.items():
            if version < marked[-1] and f"{self._folder.root}/{name}" not in kept:
                self._delete(f"{self._folder.root}/{name}")

    def _delete(self, path: str) -> None:
        """The mark goes last: what is left of a version without bytes is found again by it."""
        for each in (path, path + _ALIAS, path + _COMMITTED):
            try:
                self._folder.system.rm_file(each)
            except FileNotFoundError:
                continue

    @contextmanager
    def _whole_or_not(self, path: str) -> Generator[Any]:
        system = self._folder.system
        was_there = system.exists(path)
        file = system.open(path, "wb", autocommit=False)
        try:
            with file:
                yield file
        except BaseException:
            file.discard()
            # Some stores keep a half all the same; a reader would find it too short.
            if not was_there and system.exists(path):
                system.rm_file(path)
            raise
        file.commit()


class Receiver:
    """WeightReceiver from a Folder."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def receive(self, order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]) -> Receipt:
        arenas.check_received(order, target, buffer)
        began_at = time.monotonic()
        header, path = _opened(self._folder, order.arena)
        check_same_tensors(order.arena.path, header.layout, order.source)
        # The plan's boxes are of whole tensors, and so are the file's.
        places = {name: indices[0] for name, indices in header.layout.by_tensor.items()}
        copies = [replace(copy, source=places[copy.tensor], source_rank=0) for copy in order.copies]
        buckets = packed(header.layout.size(), RANGE_BYTES)
        wire_s = 0.0
        for bucket, found in zip(buckets, pieces(copies, header.layout, buckets), strict=True):
            reading_at = time.monotonic()
            start, stop = header.begin + bucket.start, header.begin + bucket.stop
            data = _read(self._folder, path, start, stop)
            wire_s += time.monotonic() - reading_at
            place(found, data, target, buffer)
        loaded_at = time.monotonic()
        arenas.verify(order, target, buffer)
        return Receipt(
            wire_s,
            loaded_at - began_at - wire_s,
            time.monotonic() - loaded_at,
            header.size,
            len(buckets),
        )


def _opened(folder: Folder, arena: Arena) -> tuple[safetensors.Header, str]:
    """The proved header, and the path of its file."""
    path = folder.target(arena)
    try:
        size = folder.system.size(path)
    except FileNotFoundError as error:
        raise ArenaMissingError(
            f"{arena.path}: not there", field="arena.path", value=arena.path
        ) from error
    head = _read(folder, path, 0, min(size, _GUESS))
    try:
        length = safetensors.header_bytes(head)
        if head.size < length <= min(size, safetensors.LARGEST_HEADER):
            head = _read(folder, path, 0, length)
        return safetensors.decode(head, size), path
    except safetensors.SafetensorsError as error:
        raise ArenaCorruptError(
            f"{arena.path}: {error.message}",
            field=error.field,
            limit=error.limit,
            value=error.value,
        ) from error


def _read(folder: Folder, path: str, start: int, stop: int) -> NDArray[np.uint8]:
    """The bytes [start, stop); raises ArenaMissingError, and ArenaCorruptError for fewer."""
    try:
        data = folder.system.cat_file(path, start, stop) if stop > start else b""
    except FileNotFoundError as error:
        raise ArenaMissingError(f"{path}: not there", field="arena.path", value=path) from error
    if len(data) != stop - start:
        raise ArenaCorruptError(
            f"{path}: {len(data)} bytes at {start}, not {stop - start}",
            field="arena.size",
            limit=stop,
            value=start + len(data),
        )
    return np.frombuffer(data, np.uint8)


@contextmanager
def _room_for(path: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in arenas.FULL:
            raise
        raise ArenaFullError(
            f"{path}: {error.strerror}", field="arena.path", limit="room there", value=path
        ) from error
