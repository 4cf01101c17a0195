"""Boxes of row-major tensors: which of two lists of boxes intersect.

Shapes: N, M = boxes of a list, A = axes of the tensor, P = intersecting pairs.
"""

import numpy as np
from numpy.typing import NDArray

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""First index and one past the last index on each axis."""

_FEW = 64
"""Pairs up to which plain Python is faster than arrays."""
_MOST_CANDIDATES = 1 << 20
"""Pairs that are compared at once; bounds the memory."""


def intersect(one: Box, other: Box) -> Box | None:
    """The box of the elements that lie in both; None when there are none."""
    start = tuple(map(max, one[0], other[0]))
    stop = tuple(map(min, one[1], other[1]))
    return (start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None


def intersecting(ones: list[Box], others: list[Box]) -> list[tuple[int, int]]:
    """Pairs (i, j) of which `ones[i]` and `others[j]` intersect, ordered by i, then j.

    Near linear in the boxes and pairs where either list is cut along one axis.
    """
    if len(ones) * len(others) <= _FEW or not ones[0][0]:
        return [
            (i, j)
            for i, one in enumerate(ones)
            for j, other in enumerate(others)
            if intersect(one, other)
        ]
    pairs = _swept(_arrays(ones), _arrays(others))
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    return [(int(i), int(j)) for i, j in pairs[order]]


def _arrays(boxes: list[Box]) -> NDArray[np.int64]:
    """int64 [N, 2, A]: starts and stops."""
    return np.array(boxes, np.int64)


def _swept(ones: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Intersecting pairs, int64 [P, 2], found by a sweep along the axis that `others` cut most."""
    cuts = [len(np.unique(others[:, 0, axis])) for axis in range(others.shape[2])]
    axis = int(np.argmax(cuts))
    order = np.argsort(others[:, 0, axis], kind="stable")
    others = others[order]
    # A running maximum makes the stops searchable too: no box before `first` reaches `ones[i]`.
    reach = np.maximum.accumulate(others[:, 1, axis])
    first = np.searchsorted(reach, ones[:, 0, axis], side="right")
    last = np.searchsorted(others[:, 0, axis], ones[:, 1, axis], side="left")
    counts = np.maximum(last - first, 0)
    found = [np.empty((0, 2), np.int64)]
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(ones):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + _MOST_CANDIDATES, side="right")))
        i = np.repeat(np.arange(begin, end), counts[begin:end])
        j = np.arange(i.size) - np.repeat(
            ends[begin:end] - counts[begin:end] - done, counts[begin:end]
        )
        j += first[i]
        meet = np.all(
            np.maximum(ones[i, 0], others[j, 0]) < np.minimum(ones[i, 1], others[j, 1]), axis=1
        )
        found.append(np.stack((i[meet], order[j[meet]]), axis=1))
        begin = end
    return np.concatenate(found)
