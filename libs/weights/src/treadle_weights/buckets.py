"""Buckets: an arena cut into launches of about one size, and what of each goes where.

Pure: a bucket is a range of bytes of the sender's arena, and what arrives in it is placed by the
plan, so that a receiver needs room for two buckets and not for a second arena.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_weights.boxes import Box, intersect
from treadle_weights.layouts import ALIGNMENT, ITEM_SIZES, Layout
from treadle_weights.plan import Copy, box_of


@dataclass(frozen=True, slots=True)
class Bucket:
    """The bytes [start, stop) of an arena, which travel in one launch."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """In bytes, at least 1."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """A box that lies within one bucket and within one rectangle of the receiver."""

    begin: int
    """First byte, in the bucket, of the contiguous run that holds the box."""
    item_size: int
    """Bytes of an element."""
    run: tuple[int, ...]
    """Extent of the run, row-major."""
    inner: tuple[slice, ...]
    """The box within the run."""
    target: int
    """Index into the receiver's rectangles."""
    start: tuple[int, ...]
    """First index of the box in the whole tensor, on each axis."""
    stop: tuple[int, ...]
    """One past the last, on each axis."""


def packed(size: int, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Cuts `size` bytes into as few buckets of at most `bucket_bytes` as there can be.

    Raises InvalidFieldError unless `bucket_bytes` is a positive multiple of ALIGNMENT, which keeps
    every element in one bucket.
    """
    if bucket_bytes < 1 or bucket_bytes % ALIGNMENT:
        raise InvalidFieldError(
            "bucket_bytes", limit=f"a positive multiple of {ALIGNMENT}", value=bucket_bytes
        )
    return tuple(
        Bucket(start, min(start + bucket_bytes, size)) for start in range(0, size, bucket_bytes)
    )


def one_each(layout: Layout) -> tuple[Bucket, ...]:
    """One bucket for each rectangle of rank 0, in order of offset: a launch per tensor."""
    ordered = sorted((r for r in layout.rectangles if not r.rank), key=lambda r: r.offset)
    return tuple(Bucket(rectangle.offset, rectangle.end) for rectangle in ordered)


def pieces(
    copies: Sequence[Copy], source: Layout, buckets: Sequence[Bucket]
) -> tuple[tuple[Piece, ...], ...]:
    """What each bucket brings: every element of every copy in exactly one piece.

    `buckets` are in order and cover what the copies read. Near linear in copies and buckets.
    """
    starts = [bucket.start for bucket in buckets]
    found: list[list[Piece]] = [[] for _ in buckets]
    for copy in copies:
        rectangle = source.rectangles[copy.source]
        first = max(bisect_right(starts, rectangle.offset) - 1, 0)
        for index in range(first, len(buckets)):
            if buckets[index].start >= rectangle.end:
                break
            found[index].extend(_pieces(copy, source, buckets[index]))
    return tuple(tuple(each) for each in found)


def place(
    found: Sequence[Piece], bucket: NDArray[np.uint8], target: Layout, buffer: NDArray[np.uint8]
) -> None:
    """Copies the pieces of a bucket, uint8 [bucket.size], into `buffer`, laid out as `target`."""
    for piece in found:
        end = piece.begin + math.prod(piece.run) * piece.item_size
        run: NDArray[Any] = bucket[piece.begin : end].view(f"u{piece.item_size}")
        box = box_of(buffer, target.rectangles[piece.target], piece.start, piece.stop)
        # The ellipsis keeps the box of a scalar a view.
        box[...] = run.reshape(piece.run)[(*piece.inner, ...)]


def _pieces(copy: Copy, source: Layout, bucket: Bucket) -> Iterator[Piece]:
    rectangle = source.rectangles[copy.source]
    item_size = ITEM_SIZES[rectangle.dtype]
    first = max(bucket.start - rectangle.offset, 0) // item_size
    last = (min(bucket.stop, rectangle.end) - rectangle.offset) // item_size
    origin = rectangle.start
    wanted = (_less(copy.start, origin), _less(copy.stop, origin))
    for box in _runs(rectangle.extent, first, last):
        both = intersect(box, wanted)
        if both is None:
            continue
        begin = rectangle.offset + _flat(box[0], rectangle.extent) * item_size - bucket.start
        yield Piece(
            begin,
            item_size,
            _less(box[1], box[0]),
            tuple(slice(a - o, b - o) for a, b, o in zip(*both, box[0], strict=True)),
            copy.target,
            tuple(a + o for a, o in zip(both[0], origin, strict=True)),
            tuple(b + o for b, o in zip(both[1], origin, strict=True)),
        )


def _runs(extent: tuple[int, ...], first: int, last: int) -> Iterator[Box]:
    """The elements [first, last) of a row-major array as boxes, each contiguous in it.

    At most two for each axis: the rest of a row, whole rows, the begin of a row.
    """
    if first >= last:
        return
    if not extent:
        yield (), ()
        return
    row = math.prod(extent[1:])
    top, begin = divmod(first, row)
    bottom, end = divmod(last, row)
    if begin:
        rest = min(last - top * row, row)
        for start, stop in _runs(extent[1:], begin, rest):
            yield (top, *start), (top + 1, *stop)
        top += 1
    if top < bottom:
        yield (top, *(0,) * (len(extent) - 1)), (bottom, *extent[1:])
    if end and bottom >= top:
        for start, stop in _runs(extent[1:], 0, end):
            yield (bottom, *start), (bottom + 1, *stop)


def _flat(index: tuple[int, ...], extent: tuple[int, ...]) -> int:
    flat = 0
    for at, length in zip(index, extent, strict=True):
        flat = flat * length + at
    return flat


def _less(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))
