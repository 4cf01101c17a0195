"""What crosses between tests and the code that they test: plain values, as JSON.

Of the standard library alone, since both sides run inside a box. A value arrives as what it is and
not as what it claims to be: no class of the other side, and none of its methods, comes with it.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}


def pack(value: object, keep: Callable[[object], int]) -> Any:
    """JSON that stands for `value`; what is no plain value stays, under the number of `keep`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, dict):
        pairs = cast("dict[object, object]", value).items()
        return {"dict": [[pack(key, keep), pack(item, keep)] for key, item in pairs]}
    for name, kind in SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [pack(item, keep) for item in cast("Iterable[object]", value)]}
    return {"object": keep(value)}


def unpack(told: Any, find: Callable[[int], object]) -> Any:
    """The value that `pack` was given; `find` is what stands for a number."""
    if not isinstance(told, dict):
        return told
    ((name, content),) = cast("dict[str, Any]", told).items()
    if name == "bytes":
        return bytes.fromhex(content)
    if name == "complex":
        return complex(*content)
    if name == "dict":
        return {unpack(key, find): unpack(item, find) for key, item in content}
    if name == "object":
        return find(content)
    return SEQUENCES[name](unpack(item, find) for item in content)
