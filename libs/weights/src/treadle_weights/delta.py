"""Deltas: the values that changed between two versions, not their differences. Lossless.

A delta is a header (its length in 8 bytes, little-endian; JSON), then for each tensor in which
something changed the gaps between changed elements and the new values of these. A gap is coded in
1, 2 or 4 bytes, whichever is shortest for the tensor: the largest number of a code means "as many
elements further, and none changed". Values may be written twice with the same outcome.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_weights.digests import digest_of, hex_digest
from treadle_weights.layouts import ITEM_SIZES, Layout, Rectangle
from treadle_weights.plan import box_of
from treadle_weights.transport import ArenaCorruptError

_LENGTH = struct.Struct("<Q")
_WIDTHS = (1, 2, 4)
"""Bytes of a gap's code."""
_BLOCK, _SAMPLE = 65536, 1024
"""Elements of a block, and how many of each are looked at to estimate what changed."""
_ENTRY_BYTES = 96
"""Of a tensor in the header, about."""


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast the ways of sending are, in bytes of a second."""

    link: float
    """The wire."""
    scan: float
    """Comparing two versions and coding what changed, in bytes of one version."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The elements of one tensor that changed."""

    indices: NDArray[np.int64]
    """In the whole tensor, row-major, rising, [n]."""
    values: NDArray[Any]
    """Their new bits, unsigned, [n]."""
    base: int
    """Digest of the tensor that they are changes of."""


def encode(
    layout: Layout,
    base: NDArray[np.uint8],
    new: NDArray[np.uint8],
    base_digests: Mapping[str, int],
) -> NDArray[np.uint8]:
    """The delta from `base` to `new`, both laid out as `layout` with whole tensors.

    Raises InvalidFieldError where a tensor lies in parts.
    """
    entries: list[tuple[str, str, int, int, int]] = []
    body: list[NDArray[np.uint8]] = []
    for rectangle in layout.rectangles:
        _check_whole(rectangle)
        now = box_of(new, rectangle).reshape(-1)
        indices = np.flatnonzero(now != box_of(base, rectangle).reshape(-1))
        if not indices.size:
            continue
        width, gaps = _coded(indices)
        digest = hex_digest(base_digests[rectangle.tensor])
        entries.append((rectangle.tensor, digest, int(indices.size), width, gaps.size))
        body += [gaps, now[indices].view(np.uint8)]
    header = json.dumps(entries, separators=(",", ":")).encode()
    head = np.frombuffer(_LENGTH.pack(len(header)) + header, np.uint8)
    return np.concatenate([head, *body])


def decode(
    data: NDArray[np.uint8], tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Changes]:
    """The changes of a delta by tensor; `tensors` are dtype and shape of the sender's, by name.

    Raises ArenaCorruptError for anything that `encode` does not write, and writes nothing.
    """
    if data.size < _LENGTH.size:
        raise _corrupt("delta", f">= {_LENGTH.size} bytes", data.size)
    (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
    at = _LENGTH.size + length
    if at > data.size:
        raise _corrupt("delta.header", f"<= {data.size - _LENGTH.size} bytes", length)
    found: dict[str, Changes] = {}
    for name, base, count, width, gap_bytes in _entries(data[_LENGTH.size : at].tobytes()):
        if name not in tensors or name in found:
            raise _corrupt(name[:100], "a tensor of the sender, once", "another")
        dtype, shape = tensors[name]
        value_bytes = count * ITEM_SIZES[dtype]
        if at + gap_bytes + value_bytes > data.size:
            raise _corrupt(name, f"<= {data.size - at} bytes", gap_bytes + value_bytes)
        indices = _indices(name, data[at : at + gap_bytes], width, count)
        at += gap_bytes
        # The copy aligns it.
        values = data[at : at + value_bytes].copy().view(f"u{ITEM_SIZES[dtype]}")
        at += value_bytes
        elements = int(np.prod(shape, dtype=np.int64))
        if int(indices[-1]) >= elements:
            raise _corrupt(name, f"an element < {elements}", int(indices[-1]))
        found[name] = Changes(indices, values, base)
    if at != data.size:
        raise _corrupt("delta", f"{at} bytes", data.size)
    return found


def apply(changes: Mapping[str, Changes], target: Layout, buffer: NDArray[np.uint8]) -> None:
    """Writes the changes into `buffer`, which holds their base laid out as `target`.

    Tensors that `target` has not are left out.
    """
    for rectangle in target.rectangles:
        change = changes.get(rectangle.tensor)
        if change is None:
            continue
        # The reshape of a contiguous box is a view.
        items = box_of(buffer, rectangle).reshape(-1)
        if rectangle.extent == rectangle.shape:
            items[change.indices] = change.values
            continue
        places = np.unravel_index(change.indices, rectangle.shape)
        inside = np.ones(change.indices.size, np.bool_)
        for place, start, stop in zip(places, *rectangle.box, strict=True):
            inside &= (place >= start) & (place < stop)
        local = [p[inside] - start for p, start in zip(places, rectangle.start, strict=True)]
        items[np.ravel_multi_index(local, rectangle.extent)] = change.values[inside]


def estimate(layout: Layout, base: NDArray[np.uint8], new: NDArray[np.uint8]) -> int:
    """About how many bytes `encode` would make, from one element in 64 of large tensors."""
    total = 0.0
    for rectangle in layout.rectangles:
        one, other = (box_of(data, rectangle).reshape(-1) for data in (base, new))
        whole = one.size // _BLOCK * _BLOCK
        if whole:
            one, other = (items[:whole].reshape(-1, _BLOCK)[:, :_SAMPLE] for items in (one, other))
        seen, changed = one.size, int(np.count_nonzero(one != other))
        if changed:
            count = rectangle.num_elements * changed / seen
            gap = rectangle.num_elements / count
            total += count * (_gap_bytes(gap) + ITEM_SIZES[rectangle.dtype]) + _ENTRY_BYTES
    return int(total)


def is_delta_faster(dense_bytes: int, delta_bytes: int, rates: Rates) -> bool:
    """Whether comparing, coding and sending the delta takes less time than sending it all.

    dense: D / link; delta: D / scan + d / link.
    """
    return dense_bytes / rates.scan + delta_bytes / rates.link < dense_bytes / rates.link


def _gap_bytes(gap: float) -> float:
    """Of a code, about, where changes are as far apart: the shortest width."""
    return min(width * (1 + gap / (256**width - 1)) for width in _WIDTHS)


def _coded(indices: NDArray[np.int64]) -> tuple[int, NDArray[np.uint8]]:
    """Width and codes of the gaps before rising indices."""
    gaps = np.diff(indices, prepend=-1) - 1
    sizes = {w: w * (int((gaps // (256**w - 1)).sum()) + gaps.size) for w in _WIDTHS}
    width = min(_WIDTHS, key=lambda w: sizes[w])
    steps, rest = np.divmod(gaps, 256**width - 1)
    codes = np.full(sizes[width] // width, 256**width - 1, f"<u{width}")
    codes[np.cumsum(steps + 1) - 1] = rest
    return width, codes.view(np.uint8)


def _indices(name: str, data: NDArray[np.uint8], width: int, count: int) -> NDArray[np.int64]:
    if width not in _WIDTHS or data.size % width:
        raise _corrupt(name, f"codes of {_WIDTHS} bytes", f"{data.size} bytes of {width}")
    codes = data.copy().view(f"<u{width}")
    ends = np.flatnonzero(codes != 256**width - 1)
    if ends.size != count or not count or int(ends[-1]) != codes.size - 1:
        raise _corrupt(name, f"{count} changes, at least 1", int(ends.size))
    return np.cumsum(codes, dtype=np.int64)[ends] + np.arange(count)


def _entries(text: bytes) -> Iterator[tuple[str, int, int, int, int]]:
    try:
        entries: object = json.loads(text)
    except ValueError:
        entries = None
    if not isinstance(entries, list):
        raise _corrupt("delta.header", "a JSON list", repr(text[:40]))
    for entry in cast("list[object]", entries):
        parts = cast("list[object]", entry if isinstance(entry, list) else [])
        if len(parts) != 5:
            raise _corrupt("delta.header", "entries of 5", text[:80])
        name, base, count, width, size = parts
        numbers = [n for n in (count, width, size) if type(n) is int and 0 <= n < 2**48]
        if not isinstance(name, str) or len(numbers) != 3:
            raise _corrupt("delta.header", "a name and numbers >= 0", text[:80])
        try:
            digest = digest_of(name, base)
        except InvalidFieldError as error:
            raise _corrupt(name[:100], "16 hex digits", repr(base)[:40]) from error
        yield name, digest, numbers[0], numbers[1], numbers[2]


def _check_whole(rectangle: Rectangle) -> None:
    if rectangle.extent != rectangle.shape:
        raise InvalidFieldError(
            rectangle.tensor, limit=f"whole, {list(rectangle.shape)}", value=list(rectangle.extent)
        )


def _corrupt(name: str, limit: object, value: object) -> ArenaCorruptError:
    return ArenaCorruptError(
        f"{name}: expected {limit}, got {value}", field=name, limit=limit, value=value
    )
