"""Layouts: which box of which named tensor lies where in a side's buffers.

A side, trainer or engine, has one buffer of bytes per rank; every element of every tensor that it
names lies in exactly one rectangle.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from treadle_core.errors import InvalidFieldError
from treadle_weights.boxes import Box, intersecting

ITEM_SIZES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
}
"""Bytes of an element, by the name that PyTorch gives the dtype."""

ALIGNMENT = 64
"""`whole` puts each tensor at a multiple of this many bytes: a cache line."""

_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A box of one named tensor, and where its bytes lie: contiguous, row-major.

    Construction raises InvalidFieldError on a box that is empty or outside its tensor.
    """

    tensor: str
    dtype: str
    """A key of ITEM_SIZES."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    start: tuple[int, ...]
    """First index of the box on each axis."""
    stop: tuple[int, ...]
    """One past the last index of the box on each axis."""
    offset: int
    """First byte of the box in its rank's buffer; a multiple of the item size."""
    rank: int = 0
    """Rank that holds it."""

    def __post_init__(self) -> None:
        """Checks the box against the tensor."""
        if not self.tensor:
            raise InvalidFieldError("tensor", limit="a name", value="''")
        if self.dtype not in ITEM_SIZES:
            raise self._invalid("dtype", f"one of {', '.join(ITEM_SIZES)}", repr(self.dtype[:40]))
        if not len(self.shape) == len(self.start) == len(self.stop):
            raise self._invalid("start", f"{len(self.shape)} axes as shape", len(self.start))
        for begin, end, length in zip(self.start, self.stop, self.shape, strict=True):
            if not 0 <= begin < end <= length:
                raise self._invalid("stop", f"0 <= start < stop <= {length}", (begin, end))
        if self.offset < 0 or self.offset % ITEM_SIZES[self.dtype]:
            raise self._invalid("offset", f"a multiple of {ITEM_SIZES[self.dtype]}", self.offset)
        if self.rank < 0:
            raise self._invalid("rank", ">= 0", self.rank)
        # Python integers do not overflow, the wire's and numpy's do.
        if math.prod(self.shape) * 8 > _LARGEST or self.end > _LARGEST:
            raise self._invalid("shape", "less than 2^63 bytes", list(self.shape))

    @property
    def box(self) -> Box:
        """Its first and one past its last index on each axis."""
        return self.start, self.stop

    @property
    def extent(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def num_elements(self) -> int:
        """Elements in the box, at least 1."""
        return math.prod(self.extent)

    @property
    def size(self) -> int:
        """Bytes of the box."""
        return self.num_elements * ITEM_SIZES[self.dtype]

    @property
    def end(self) -> int:
        """One past its last byte in its rank's buffer."""
        return self.offset + self.size

    def _invalid(self, name: str, limit: object, value: object) -> InvalidFieldError:
        return InvalidFieldError(f"{self.tensor}.{name}", limit=limit, value=value)


@dataclass(frozen=True)
class Layout:
    """One side's rectangles. Construction proves that they hold every element exactly once.

    Raises InvalidFieldError naming the tensor where rectangles disagree on dtype or shape,
    overlap in it or in a buffer, or leave elements out.
    """

    rectangles: tuple[Rectangle, ...] = field()

    def __post_init__(self) -> None:
        """Proves the promise; near linear in the rectangles."""
        for indices in self.by_tensor.values():
            _check_partition([self.rectangles[index] for index in indices])
        _check_buffers(self.rectangles)

    def __hash__(self) -> int:
        """Computed once: plans are cached by the layouts that they join."""
        return self._hash

    def size(self, rank: int = 0) -> int:
        """Bytes of a rank's buffer; 0 for a rank that holds nothing."""
        return self._sizes.get(rank, 0)

    @cached_property
    def by_tensor(self) -> Mapping[str, Sequence[int]]:
        """Indices into `rectangles` of each tensor, tensors in order of appearance."""
        indices: dict[str, list[int]] = {}
        for index, rectangle in enumerate(self.rectangles):
            indices.setdefault(rectangle.tensor, []).append(index)
        return indices

    @cached_property
    def tensors(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor, by name, wherever it lies."""
        firsts = (self.rectangles[indices[0]] for indices in self.by_tensor.values())
        return {first.tensor: (first.dtype, first.shape) for first in firsts}

    @cached_property
    def _sizes(self) -> Mapping[int, int]:
        sizes: dict[int, int] = {}
        for rectangle in self.rectangles:
            sizes[rectangle.rank] = max(sizes.get(rectangle.rank, 0), rectangle.end)
        return sizes

    @cached_property
    def _hash(self) -> int:
        return hash(self.rectangles)


def whole(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Layout:
    """Every tensor in one piece on rank 0, in the order of `tensors`: name -> (dtype, shape).

    A tensor without elements needs no place and gets none. Tied tensors appear once, under one
    name.
    """
    rectangles: list[Rectangle] = []
    offset = 0
    for name, (dtype, shape) in tensors.items():
        lengths = tuple(int(length) for length in shape)
        if 0 in lengths:
            continue
        rectangle = Rectangle(name, dtype, lengths, (0,) * len(lengths), lengths, offset)
        rectangles.append(rectangle)
        offset = -(-rectangle.end // ALIGNMENT) * ALIGNMENT
    return Layout(tuple(rectangles))


def _check_partition(rectangles: list[Rectangle]) -> None:
    """All of one tensor: volumes that sum to the whole, and no two that meet."""
    first = rectangles[0]
    for other in rectangles[1:]:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise InvalidFieldError(
                first.tensor,
                limit=f"{first.dtype} {list(first.shape)} in all its rectangles",
                value=f"{other.dtype} {list(other.shape)}",
            )
    total = math.prod(first.shape)
    held = sum(rectangle.num_elements for rectangle in rectangles)
    if held != total:
        raise InvalidFieldError(
            first.tensor,
            limit=f"{total} elements, each in exactly one rectangle",
            value=f"{held} elements in {len(rectangles)} rectangles",
        )
    if len(rectangles) == 1:
        return
    boxes = [rectangle.box for rectangle in rectangles]
    for one, other in intersecting(boxes, boxes):
        if one != other:
            raise InvalidFieldError(
                first.tensor,
                limit="each element in exactly one rectangle",
                value=f"{_text(boxes[one])} meets {_text(boxes[other])}",
            )


def _check_buffers(rectangles: Iterable[Rectangle]) -> None:
    """No two rectangles share a byte of a rank's buffer."""
    ordered = sorted(rectangles, key=lambda rectangle: (rectangle.rank, rectangle.offset))
    for before, after in pairwise(ordered):
        if before.rank == after.rank and after.offset < before.end:
            raise InvalidFieldError(
                f"{after.tensor}.offset",
                limit=f">= {before.end}, where {before.tensor} ends",
                value=after.offset,
            )


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(*box, strict=True)) + "]"
