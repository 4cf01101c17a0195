"""What transports over files share: room for an arena, tensors packed into it, bytes verified."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_weights.digests import combine, hex_digest, layout_digests, tensor_digest
from treadle_weights.layouts import ITEM_SIZES, Layout, Rectangle
from treadle_weights.plan import box_of
from treadle_weights.transport import ArenaCorruptError, ArenaFullError, LoadOrder

FULL = {errno.ENOSPC, errno.ENOMEM, errno.EDQUOT}
"""Numbers of errors that say that there is no room."""


def checked_directory(directory: str | Path) -> Path:
    """Raises InvalidFieldError where `directory` is none."""
    path = Path(directory)
    if not path.is_dir():
        raise InvalidFieldError("directory", limit="a directory", value=path)
    return path


def check_one_rank(layout: Layout) -> None:
    """One arena is one buffer, and so is an arrival buffer. Raises InvalidFieldError."""
    for rectangle in layout.rectangles:
        if rectangle.rank:
            raise InvalidFieldError(
                f"{rectangle.tensor}.rank", limit="0, by this transport", value=rectangle.rank
            )


def reserve(path: Path, descriptor: int, size: int) -> None:
    """Takes the room now: a page that is missing later would kill the writer (SIGBUS).

    Raises ArenaFullError.
    """
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
