"""What one forward computes: tokens of many slots in one packed row, in groups that attend alike.

Packing keeps the dense layers free of padding; only attention pads, within a group whose slots
feed a like number of tokens.

Shapes: N = tokens of the batch, M = slots that sample, R = slots of a group, n = its tokens,
Q = tokens that a slot of the group feeds at most.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle_rollout.adapters.transformers_engine.slots import Slots

KEY_STEP = 16
"""Attended lengths are multiples of this: few shapes, aligned rows."""

_MIN_OCCUPANCY = 0.5
"""Share of a span of slots that must run for attending over the span to beat a gather."""

Index = NDArray[np.int64]

_KIND_BOUNDS: Index = np.array([0, *(4**power for power in range(20))])
"""Slots that feed 1 token, 2 to 4, 5 to 16, ... are of one kind; those that feed none of none."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Slots that feed about as many tokens each, padded to Q for attention alone."""

    start: int
    stop: int
    """Its tokens in the batch, start <= i < stop; n = stop - start."""
    span: tuple[int, int] | None
    """First and last + 1 of its slots, where they are taken as they lie."""
    slots: Index
    """Slots that are gathered where there is no span, [R]."""
    queries: int
    """Q."""
    keys: int
    """Leading keys that its slots attend to at most; a multiple of KEY_STEP."""
    positions: Index
    """Last key that a padded query attends to, [R, Q]."""
    pad: Index | None
    """Token (0 <= i < n) that stands at each padded place, [R * Q]; None for the identity."""
    unpad: Index | None
    """Padded place of each token, [n]; None for the identity."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One forward, as host arrays."""

    token_ids: Index
    """[N]"""
    slots: Index
    """Slot of each token, [N]."""
    positions: Index
    """Place of each token in its slot's sequence, [N]."""
    groups: tuple[Group, ...]
    """In the order of their tokens."""
    fed: Index
    """Slots that feed, [F]."""
    counts: Index
    """Tokens that each of them feeds, [F]."""
    sampling: Index
    """Slots whose last known token is fed, so that the next one is sampled, [M]."""
    last: Index
    """Place of that token in the batch, [M]."""


def plan(slots: Slots, max_tokens: int, *, singly: int = 1) -> Batch | None:
    """Feeds every running slot what it lacks, at most `max_tokens` in all; None if none runs.

    Slots that lack one token always feed it; the others share what is left, oldest call first.
    Where they are a minority, those that lack up to `singly` feed one token too.
    """
    running = np.flatnonzero(slots.call >= 0)
    if not running.size:
        return None
    lacking = slots.known[running] - slots.cached[running]
    if singly > 1 and 2 * np.count_nonzero(lacking > 1) <= lacking.size:
        lacking = np.where(lacking <= singly, 1, lacking)
    counts = _shared(lacking, slots.call[running], max_tokens)
    # Slots that feed a like number of tokens are neighbours, in ascending order of slots.
    kinds = _KIND_BOUNDS.searchsorted(counts)
    pieces: list[tuple[Index, Index]] = []
    groups: list[Group] = []
    start = 0
    for kind in sorted(set(kinds.tolist()) - {0}):
        chosen = kinds == kind
        pieces.append((running[chosen], counts[chosen]))
        groups.append(_group(slots, *pieces[-1], start))
        start = groups[-1].stop
    return _batch(slots, pieces, tuple(groups))


def _shared(lacking: Index, calls: Index, max_tokens: int) -> Index:
    """Tokens that each slot may feed."""
    if lacking.sum() <= max_tokens:
        return lacking
    counts = np.minimum(lacking, 1)
    left = max(max_tokens - int(counts.sum()), 0)
    for i in np.argsort(calls):
        more = min(int(lacking[i]) - 1, left)
        counts[i] += more
        left -= more
    return counts


def _group(slots: Slots, chosen: Index, counts: Index, start: int) -> Group:
    size = int(counts.sum())
    queries = int(counts.max())
    first = slots.cached[chosen]
    keys = -(-int((first + counts).max()) // KEY_STEP) * KEY_STEP
    if queries == 1:
        return _decoding_group(chosen, first, keys, start)
    steps = np.arange(queries)
    # Padded places repeat the slot's last token: any finite query does.
    within = np.minimum(steps, counts[:, None] - 1)
    offsets = np.cumsum(counts) - counts
    return Group(
        start=start,
        stop=start + size,
        span=_span(chosen, len(chosen)),
        slots=chosen,
        queries=queries,
        keys=keys,
        positions=first[:, None] + within,
        pad=(offsets[:, None] + within).ravel(),
        unpad=np.flatnonzero(steps < counts[:, None]),
    )


def _decoding_group(chosen: Index, first: Index, keys: int, start: int) -> Group:
    size = len(chosen)
    span = _span(chosen, int(size / _MIN_OCCUPANCY))
    positions, pad, unpad = first, None, None
    if span is not None and span[1] - span[0] > size:
        width = span[1] - span[0]
        unpad = chosen - span[0]
        pad = np.zeros(width, np.int64)
        pad[unpad] = np.arange(size)
        positions = np.zeros(width, np.int64)
        positions[unpad] = first
    return Group(start, start + size, span, chosen, 1, keys, positions[:, None], pad, unpad)


def _span(chosen: Index, widest: int) -> tuple[int, int] | None:
    low, high = int(chosen[0]), int(chosen[-1]) + 1
    return (low, high) if high - low <= widest else None


def _batch(slots: Slots, pieces: list[tuple[Index, Index]], groups: tuple[Group, ...]) -> Batch:
    fed = np.concatenate([chosen for chosen, _ in pieces])
    counts = np.concatenate([count for _, count in pieces])
    ends = np.cumsum(counts)
    of_token = np.repeat(fed, counts)
    first = slots.cached[fed]
    size = int(ends[-1])
    positions = np.arange(size) - np.repeat(ends - counts - first, counts)
    complete = first + counts == slots.known[fed]
    return Batch(
        token_ids=slots.token_ids[of_token, positions],
        slots=of_token,
        positions=positions,
        groups=groups,
        fed=fed,
        counts=counts,
        sampling=fed[complete],
        last=ends[complete] - 1,
    )
