"""The safetensors format: a strict reader and writer of its header. Tensors are bytes beside it.

A file is the header's length (8 bytes, little-endian), the header (JSON, padded with spaces), and
the tensors' bytes end to end. Nothing here needs the package of that name, which reads the files.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_weights.layouts import ITEM_SIZES, Layout, Rectangle

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
}
_NAMES = {code: name for name, code in _DTYPES.items()}

_METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
"""The data begin at a multiple of this, the largest item size."""

LARGEST_HEADER = 100_000_000
"""Bytes; as the format says."""


class SafetensorsError(TreadleError):
    """The bytes are no safetensors file."""

    kind = Kind.CORRUPT
    reason = "SAFETENSORS_CORRUPT"


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself."""

    layout: Layout
    """Whole tensors; offsets count from the begin of the data."""
    metadata: Mapping[str, str]
    begin: int
    """First byte of the data in the file."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.begin + self.layout.size()


def compact(layout: Layout) -> Layout:
    """The tensors of `layout` whole and end to end, as the format wants them.

    In order of falling item size, so that each lies at a multiple of its own. Raises
    InvalidFieldError for a tensor of the name that the format keeps for itself.
    """
    if _METADATA in layout.by_tensor:
        raise InvalidFieldError("tensor", limit=f"another name than {_METADATA}", value=_METADATA)
    firsts = [layout.rectangles[indices[0]] for indices in layout.by_tensor.values()]
    rectangles: list[Rectangle] = []
    offset = 0
    for first in sorted(firsts, key=lambda r: -ITEM_SIZES[r.dtype]):
        rectangle = _whole(first.tensor, first.dtype, first.shape, offset)
        rectangles.append(rectangle)
        offset = rectangle.end
    return Layout(tuple(rectangles))


def encode(layout: Layout, metadata: Mapping[str, str]) -> bytes:
    """The length and the header of a file whose data lie as `layout`, which is `compact`.

    Its length depends on the lengths of the metadata alone, not on what they say.
    """
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    for rectangle in layout.rectangles:
        entries[rectangle.tensor] = {
            "dtype": _DTYPES[rectangle.dtype],
            "shape": rectangle.shape,
            "data_offsets": (rectangle.offset, rectangle.end),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def header_bytes(data: NDArray[np.uint8]) -> int:
    """How many bytes `decode` needs of a file that begins with `data`; not proved.

    Raises SafetensorsError where it does not say.
    """
    if data.size < _LENGTH.size:
        raise _corrupt("size", f">= {_LENGTH.size} bytes", data.size)
    (length,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
    return _LENGTH.size + length


def decode(data: NDArray[np.uint8], size: int | None = None) -> Header:
    """Reads and proves the header of a file; tensors fill the rest without a gap.

    `data` are all its bytes, or of its `size` bytes the first, with the whole header. Raises
    SafetensorsError, and reads nothing beyond what is there.
    """
    length = header_bytes(data) - _LENGTH.size
    most = min(LARGEST_HEADER, data.size - _LENGTH.size)
    if not 2 <= length <= most or length % _ALIGNMENT:
        raise _corrupt("header", f"a multiple of {_ALIGNMENT}, 2 to {most} bytes", length)
    begin = _LENGTH.size + length
    entries = _parsed(data[_LENGTH.size : begin].tobytes())
    metadata = _metadata(entries.pop(_METADATA, {}))
    whole = data.size if size is None else size
    return Header(_layout(entries, whole - begin), metadata, begin)


def _metadata(entry: object) -> dict[str, str]:
    pairs = cast("dict[str, object]", entry) if isinstance(entry, dict) else {"": entry}
    metadata = {name: value for name, value in pairs.items() if isinstance(value, str)}
    if not isinstance(entry, dict) or len(metadata) != len(pairs):
        raise _corrupt(_METADATA, "names to strings", repr(pairs)[:80])
    return metadata


def _parsed(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise ValueError("a name occurs twice")
        return names

    try:
        entries: object = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _corrupt("header", "JSON", error) from error
    if not isinstance(entries, dict):
        raise _corrupt("header", "a JSON object", type(entries).__name__)
    return cast("dict[str, Any]", entries)


def _layout(entries: Mapping[str, Any], size: int) -> Layout:
    """The tensors in order of their bytes, of which there are `size`."""
    rectangles = sorted((_rectangle(*item) for item in entries.items()), key=lambda r: r.offset)
    end = 0
    for rectangle in rectangles:
        if rectangle.offset != end:
            raise _corrupt(rectangle.tensor, f"data from byte {end}", rectangle.offset)
        end = rectangle.end
    if end != size:
        raise _corrupt("size", f"{end} bytes of data", size)
    return Layout(tuple(rectangles))


def _rectangle(name: str, entry: object) -> Rectangle:
    match cast("Any", entry):
        case {"dtype": str(dtype), "shape": [*lengths], "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise _corrupt(name, "dtype, shape and data_offsets", repr(entry)[:80])
    if dtype not in _NAMES:
        raise _corrupt(name, f"a dtype of {', '.join(_NAMES)}", repr(dtype[:40]))
    sizes = tuple(length for length in lengths if isinstance(length, int))
    if len(sizes) != len(lengths):
        raise _corrupt(name, "whole numbers as shape", repr(lengths)[:80])
    try:
        rectangle = _whole(name, _NAMES[dtype], sizes, begin)
    except InvalidFieldError as error:
        raise _corrupt(name, "a tensor with elements", error.message) from error
    if rectangle.end != end:
        raise _corrupt(name, f"data to byte {rectangle.end}", end)
    return rectangle


def _whole(name: str, dtype: str, shape: tuple[int, ...], offset: int) -> Rectangle:
    return Rectangle(name, dtype, shape, (0,) * len(shape), shape, offset)


def _corrupt(field: str, limit: object, value: object) -> SafetensorsError:
    return SafetensorsError(
        f"{field}: expected {limit}, got {value}", field=field, limit=str(limit), value=str(value)
    )
