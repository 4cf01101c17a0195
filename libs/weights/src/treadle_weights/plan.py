"""Plans: which bytes of a sender go where in a receiver. A pure function of two layouts.

The bytes never pass through a gather: a plan joins any sharding on any number of ranks to any
other, and is computed once per pair of layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_weights.boxes import intersect, intersecting
from treadle_weights.layouts import ITEM_SIZES, Layout, Rectangle


class LayoutMismatchError(TreadleError):
    """The receiver's layout is not covered by the sender's; `field` is the tensor."""

    kind = Kind.PRECONDITION
    reason = "LAYOUT_MISMATCH"


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of one tensor that lies in one rectangle of each side."""

    tensor: str
    dtype: str
    start: tuple[int, ...]
    """First index of the box in the whole tensor, on each axis."""
    stop: tuple[int, ...]
    """One past the last, on each axis."""
    source_rank: int
    source: int
    """Index into the sender's rectangles."""
    target_rank: int
    target: int
    """Index into the receiver's rectangles."""


def plan(source: Layout, target: Layout) -> tuple[Copy, ...]:
    """Copies that write every element of `target` exactly once, ordered by target rectangle.

    Tensors that only `source` has are not copied. Raises LayoutMismatchError naming the tensor
    that `source` lacks or has in another dtype or shape. Near linear in the rectangles.
    """
    copies: list[Copy] = []
    for tensor, targets in target.by_tensor.items():
        sources = source.by_tensor.get(tensor)
        if sources is None:
            raise LayoutMismatchError(
                f"{tensor}: the sender has no such tensor", field=tensor, limit="sent", value="not"
            )
        _check_same(source.rectangles[sources[0]], target.rectangles[targets[0]])
        copies.extend(_copies(source, sources, target, targets))
    return tuple(copies)


def execute(
    copies: Sequence[Copy],
    source: Layout,
    target: Layout,
    source_bytes: NDArray[np.uint8],
    target_bytes: NDArray[np.uint8],
    *,
    source_rank: int = 0,
    target_rank: int = 0,
) -> None:
    """Does the copies of a plan that go from one rank's buffer to another's.

    Raises InvalidFieldError, before any byte is written, when a buffer is smaller than its
    layout or a copy is not of these layouts.
    """
    check_buffer("source_bytes", source_bytes, source.size(source_rank))
    check_buffer("target_bytes", target_bytes, target.size(target_rank))
    mine = [c for c in copies if (c.source_rank, c.target_rank) == (source_rank, target_rank)]
    for copy in mine:
        _check_copy(copy, source, target)
    for copy in mine:
        one, other = source.rectangles[copy.source], target.rectangles[copy.target]
        box_of(target_bytes, other, copy.start, copy.stop)[...] = box_of(
            source_bytes, one, copy.start, copy.stop
        )


def box_of(
    buffer: NDArray[np.uint8],
    rectangle: Rectangle,
    start: Sequence[int] | None = None,
    stop: Sequence[int] | None = None,
) -> NDArray[Any]:
    """A view of a box of a rectangle in its rank's buffer, as unsigned integers of its item size.

    `start` and `stop` are indices in the whole tensor; left out, the box is the rectangle's.
    """
    items = buffer[rectangle.offset : rectangle.end].view(f"u{ITEM_SIZES[rectangle.dtype]}")
    view = items.reshape(rectangle.extent)
    if start is None or stop is None:
        return view
    edges = zip(start, stop, rectangle.start, strict=True)
    # The ellipsis keeps the box of a scalar a view.
    return view[(*(slice(a - origin, b - origin) for a, b, origin in edges), ...)]


def check_buffer(name: str, buffer: NDArray[np.uint8], size: int) -> None:
    """Raises InvalidFieldError unless `buffer` is a flat, contiguous uint8 of `size` or more."""
    flat = buffer.ndim == 1 and buffer.dtype == np.uint8 and buffer.flags.c_contiguous
    if not flat or buffer.size < size:
        raise InvalidFieldError(
            name,
            limit=f"contiguous uint8 [N], N >= {size}",
            value=f"{buffer.dtype} {list(buffer.shape)}",
        )


def _check_same(one: Rectangle, other: Rectangle) -> None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        wanted = f"{other.dtype} {list(other.shape)}"
        sent = f"{one.dtype} {list(one.shape)}"
        raise LayoutMismatchError(
            f"{other.tensor}: the engine wants {wanted}, the sender has {sent}",
            field=other.tensor,
            limit=wanted,
            value=sent,
        )


def _copies(
    source: Layout, sources: Sequence[int], target: Layout, targets: Sequence[int]
) -> list[Copy]:
    """The intersections of one tensor's rectangles on both sides.

    Each side holds every element of the tensor exactly once, which Layout has proved, so their
    intersections do too: that is the proof of coverage.
    """
    source_boxes = [source.rectangles[index].box for index in sources]
    target_boxes = [target.rectangles[index].box for index in targets]
    copies: list[Copy] = []
    for j, i in intersecting(target_boxes, source_boxes):
        one, other = source.rectangles[sources[i]], target.rectangles[targets[j]]
        box = intersect(one.box, other.box)
        if box is None:
            continue
        copies.append(
            Copy(
                other.tensor,
                other.dtype,
                *box,
                one.rank,
                sources[i],
                other.rank,
                targets[j],
            )
        )
    return copies


def _check_copy(copy: Copy, source: Layout, target: Layout) -> None:
    """A copy may come from the wire: its box must lie in the rectangles that it names."""
    for side, layout, index, rank in (
        ("source", source, copy.source, copy.source_rank),
        ("target", target, copy.target, copy.target_rank),
    ):
        if not 0 <= index < len(layout.rectangles):
            raise InvalidFieldError(
                f"copy.{side}", limit=f"0 <= index < {len(layout.rectangles)}", value=index
            )
        rectangle = layout.rectangles[index]
        box = (copy.start, copy.stop)
        if (rectangle.tensor, rectangle.dtype, rectangle.rank) != (copy.tensor, copy.dtype, rank):
            raise InvalidFieldError(
                f"copy.{side}",
                limit=f"{rectangle.tensor}, {rectangle.dtype}, rank {rectangle.rank}",
                value=f"{copy.tensor}, {copy.dtype}, rank {rank}",
            )
        if (
            len(copy.start) != len(rectangle.shape)
            or len(copy.stop) != len(rectangle.shape)
            or intersect(box, rectangle.box) != box
        ):
            raise InvalidFieldError(
                f"copy.{side}", limit=f"a box within {rectangle.box}", value=box
            )
