"""Digests of tensors that add up: a sum over elements of a mix of (index, bits).

The digest of a tensor is the sum modulo 2^64, over its elements, of
`mix(i * GOLDEN + bits)`, where i is the element's row-major index in the whole tensor, bits its
bits as an unsigned integer, and mix the finaliser of splitmix64. Because it is a sum, the digests
of the rectangles of a partition add up to the whole's, whoever computed them. It finds
corruption and misplacement; it is no cryptographic claim.

Shapes: R = contiguous rows of a box, L = elements in each row.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_weights.layouts import ITEM_SIZES, Layout, Rectangle
from treadle_weights.plan import box_of, check_buffer

GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_MASK = 2**64 - 1
_HEX = re.compile(r"[0-9a-f]{16}")

_CHUNK = 1 << 15
"""Elements that are mixed at once: the two 64-bit work arrays then stay in the cache."""
_COLUMNS = np.arange(_CHUNK, dtype=np.uint64) * np.uint64(GOLDEN)


def tensor_digest(data: NDArray[Any], rectangle: Rectangle) -> int:
    """The part of its tensor's digest that comes from a rectangle's elements, 0 to 2^64 - 1.

    `data` holds them, contiguous and row-major: bytes (uint8) or elements of the item size.
    Raises InvalidFieldError when it has another size. Memory is bounded, whatever the size.
    """
    if data.nbytes != rectangle.size or not data.flags.c_contiguous:
        raise InvalidFieldError(
            rectangle.tensor, limit=f"{rectangle.size} contiguous bytes", value=data.nbytes
        )
    items = data.reshape(-1).view(f"u{ITEM_SIZES[rectangle.dtype]}")
    length, num_rows = _rows(rectangle)
    work = np.empty((2, min(_CHUNK, items.size)), np.uint64)
    total = 0
    rows_at_once = max(1, _CHUNK // length)
    for row in range(0, num_rows, rows_at_once):
        rows = min(rows_at_once, num_rows - row)
        bases = _bases(rectangle, length, row, rows)
        for column in range(0, length, _CHUNK):
            columns = min(_CHUNK, length - column)
            begin = row * length + column
            bits = items[begin : begin + rows * columns].reshape(rows, columns)
            total += _mixed_sum(bits, bases + np.uint64(column * GOLDEN & _MASK), work)
    return total & _MASK


def combine(parts: Iterable[int]) -> int:
    """The digest of the union of disjoint parts of a tensor."""
    return sum(parts) & _MASK


def layout_digests(layout: Layout, buffer: NDArray[np.uint8], rank: int = 0) -> dict[str, int]:
    """Digest of each tensor that a rank holds, by name, over the rank's rectangles.

    Where one rank holds all, these are the digests of the whole tensors.
    """
    check_buffer("buffer", buffer, layout.size(rank))
    digests: dict[str, int] = {}
    for rectangle in layout.rectangles:
        if rectangle.rank == rank:
            part = tensor_digest(box_of(buffer, rectangle), rectangle)
            digests[rectangle.tensor] = combine((digests.get(rectangle.tensor, 0), part))
    return digests


def weights_digest(digests: Mapping[str, int]) -> str:
    """One digest of all tensors by name, whatever their order: 16 hex digits."""
    lines = (f"{name}\0{hex_digest(digests[name])}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def hex_digest(digest: int) -> str:
    """A tensor's digest as 16 hex digits."""
    return f"{digest:016x}"


def digest_of(name: str, text: object) -> int:
    """The digest that `hex_digest` made `text` of; raises InvalidFieldError naming `name`."""
    if not isinstance(text, str) or not _HEX.fullmatch(text):
        raise InvalidFieldError(name, limit="16 hex digits", value=repr(text)[:40])
    return int(text, 16)


def _rows(rectangle: Rectangle) -> tuple[int, int]:
    """L and R: the longest runs of the box that are contiguous in the whole tensor too."""
    length = 1
    for extent, size in zip(reversed(rectangle.extent), reversed(rectangle.shape), strict=True):
        length *= extent
        if extent != size:
            break
    return length, rectangle.num_elements // length


def _bases(rectangle: Rectangle, length: int, row: int, rows: int) -> NDArray[np.uint64]:
    """GOLDEN times the whole-tensor index of the first element of `rows` rows, uint64 [rows]."""
    index = np.arange(row, row + rows, dtype=np.int64)
    base = np.zeros(rows, np.int64)
    stride, run = 1, 1
    for start, extent, size in zip(
        reversed(rectangle.start),
        reversed(rectangle.extent),
        reversed(rectangle.shape),
        strict=True,
    ):
        base += start * stride
        run *= extent
        if run > length:
            index, place = np.divmod(index, extent)
            base += place * stride
        stride *= size
    return base.astype(np.uint64) * np.uint64(GOLDEN)


def _mixed_sum(bits: NDArray[Any], bases: NDArray[np.uint64], work: NDArray[np.uint64]) -> int:
    """Sum of the mixes of a block of elements [R, L], not reduced.

    In place and chunk by chunk: every pass below reads and writes the cache only.
    """
    x, t = (buffer[: bits.size].reshape(bits.shape) for buffer in work)
    np.add(bases[:, None], _COLUMNS[: bits.shape[1]], out=x)
    np.add(x, bits, out=x)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(x, np.uint64(shift), out=t)
        np.bitwise_xor(x, t, out=x)
        np.multiply(x, factor, out=x)
    np.right_shift(x, np.uint64(31), out=t)
    np.bitwise_xor(x, t, out=x)
    return int(x.sum(dtype=np.uint64))
