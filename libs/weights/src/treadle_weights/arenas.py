"""What transports over files share: room for an arena, tensors packed into it, bytes verified."""

import contextlib
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_weights.digests import combine, hex_digest, layout_digests, tensor_digest
from treadle_weights.layouts import ITEM_SIZES, Layout, Rectangle
from treadle_weights.plan import box_of, check_buffer
from treadle_weights.transport import (
    Arena,
    ArenaCorruptError,
    ArenaFullError,
    ArenaMissingError,
    LoadOrder,
)

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM}
"""Numbers of errors that say that there is no room."""


def checked_directory(directory: str | Path) -> Path:
    """Raises InvalidFieldError where `directory` is none."""
    path = Path(directory)
    if not path.is_dir():
        raise InvalidFieldError("directory", limit="a directory", value=path)
    return path


def check_sent(arena: Arena, layout: Layout) -> None:
    """Raises InvalidFieldError where `layout` has more ranks or bytes than `arena`."""
    _check_one_rank(layout)
    if arena.size < layout.size():
        raise InvalidFieldError("arena.size", limit=f">= {layout.size()}", value=arena.size)


def check_received(order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]) -> None:
    """Raises InvalidFieldError where a side has more ranks, or the target more room, than is."""
    _check_one_rank(order.source)
    _check_one_rank(target)
    check_buffer("buffer", buffer, target.size())


def _check_one_rank(layout: Layout) -> None:
    """One arena is one buffer, and so is an arrival buffer."""
    for rectangle in layout.rectangles:
        if rectangle.rank:
            raise InvalidFieldError(
                f"{rectangle.tensor}.rank", limit="0, by this transport", value=rectangle.rank
            )


def mapped(path: Path) -> NDArray[np.uint8]:
    """A file's bytes, mapped read-only for as long as the array lives.

    Raises ArenaMissingError, and OSError for a link, which is not followed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError as error:
        raise ArenaMissingError(f"{path}: not there", field="arena.path", value=path) from error
    try:
        size = os.fstat(descriptor).st_size
        # What is empty cannot be mapped.
        data = mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b""
    finally:
        os.close(descriptor)
    return np.frombuffer(data, np.uint8)


@contextlib.contextmanager
def created(path: Path, size: int, mode: int) -> Generator[int]:
    """A new file, locked, with room for `size` bytes; gone where the block fails.

    The lock, and so the sender's life, lasts until somebody closes the descriptor. Raises
    FileExistsError and ArenaFullError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _reserve(path, descriptor, size)
        yield descriptor
    except BaseException:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        raise


def remove_if_abandoned(path: Path, after_s: float = 0.0) -> None:
    """Unlinks a file that is older than `after_s`, unless its sender lives.

    One that we may not open is another user's.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        if time.time() - os.fstat(descriptor).st_ctime >= after_s:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def _reserve(path: Path, descriptor: int, size: int) -> None:
    """Takes the room now: a page that is missing later would kill the writer (SIGBUS)."""
    state = os.statvfs(path.parent)
    free = state.f_bavail * state.f_frsize
    full = ArenaFullError(
        f"{path.parent}: {size} bytes wanted, {free} free",
        field="arena.size",
        limit=free,
        value=size,
    )
    if size > free:
        raise full
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise full from error


def pack(
    layout: Layout, tensors: Iterable[tuple[str, NDArray[Any]]], data: NDArray[np.uint8]
) -> dict[str, int]:
    """Copies whole tensors into `data`, laid out as `layout`; returns their digests by name.

    Raises InvalidFieldError naming a tensor that is unknown, missing, sent twice or of another
    shape or item size.
    """
    digests: dict[str, int] = {}
    for name, tensor in tensors:
        if name not in layout.by_tensor or name in digests:
            raise InvalidFieldError(name, limit="a tensor of the layout, once", value="another")
        digests[name] = combine(
            _pack(layout.rectangles[index], tensor, data) for index in layout.by_tensor[name]
        )
    for name in layout.by_tensor:
        if name not in digests:
            raise InvalidFieldError(name, limit="sent, as the layout says", value="not sent")
    return digests


def verify(order: LoadOrder, target: Layout, buffer: NDArray[np.uint8]) -> None:
    """Raises ArenaCorruptError naming a tensor in `buffer` that is not what was sent.

    What arrived is digested, not what was sent: it finds a wrong plan as well.
    """
    for name, found in layout_digests(target, buffer).items():
        expected = order.digests.get(name)
        if found != expected:
            raise ArenaCorruptError(
                f"version {order.version}: {name} has another digest than was sent",
                field=name,
                limit="a digest" if expected is None else hex_digest(expected),
                value=hex_digest(found),
            )


def _pack(rectangle: Rectangle, tensor: NDArray[Any], data: NDArray[np.uint8]) -> int:
    """Copies a rectangle's box of a whole tensor into its place; returns its digest."""
    item_size = ITEM_SIZES[rectangle.dtype]
    if tensor.shape != rectangle.shape or tensor.itemsize != item_size:
        raise InvalidFieldError(
            rectangle.tensor,
            limit=f"{list(rectangle.shape)} of {item_size} bytes",
            value=f"{list(tensor.shape)} of {tensor.itemsize}",
        )
    box = tuple(slice(a, b) for a, b in zip(*rectangle.box, strict=True))
    place = box_of(data, rectangle)
    place[...] = tensor.view(place.dtype)[box]
    return tensor_digest(place, rectangle)
