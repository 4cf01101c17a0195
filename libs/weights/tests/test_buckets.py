"""Buckets and pieces place what `execute` places, whatever the layouts and the size of a bucket."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError
from treadle_weights.buckets import Bucket, one_each, packed, pieces, place
from treadle_weights.layouts import ITEM_SIZES, Layout, Rectangle, whole
from treadle_weights.plan import execute, plan

SHAPES = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "uint8", "float64"]),
        st.lists(st.integers(1, 7), max_size=3).map(tuple),
    ),
    min_size=1,
)


def halves(layout: Layout, axis: int) -> Layout:
    """The same tensors, those that can be cut in two along an axis, in other places."""
    found: list[Rectangle] = []
    offset = 0
    for name in reversed(layout.by_tensor):
        first = layout.rectangles[layout.by_tensor[name][0]]
        shape = first.shape
        cuts = [((0,) * len(shape), shape)]
        if axis < len(shape) and shape[axis] > 1:
            middle = shape[axis] // 2
            cuts = [
                ((0,) * len(shape), (*shape[:axis], middle, *shape[axis + 1 :])),
                ((*(0,) * axis, middle, *(0,) * (len(shape) - axis - 1)), shape),
            ]
        for start, stop in cuts:
            size = ITEM_SIZES[first.dtype]
            offset = -(-offset // size) * size
            found.append(Rectangle(name, first.dtype, shape, start, stop, offset))
            offset = found[-1].end
    return Layout(tuple(found))


def filled(layout: Layout) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, layout.size(), np.uint8)


@given(SHAPES, st.integers(0, 2), st.integers(0, 2), st.sampled_from([64, 128, 1024, 0]))
def test_pieces_place_what_the_plan_says(
    shapes: dict[str, Any], one: int, other: int, bucket_bytes: int
) -> None:
    source, target = halves(whole(shapes), one), halves(whole(shapes), other)
    copies = plan(source, target)
    data = filled(source)
    expected, found = np.zeros(target.size(), np.uint8), np.zeros(target.size(), np.uint8)
    execute(copies, source, target, data, expected)

    buckets = packed(source.size(), bucket_bytes) if bucket_bytes else one_each(source)
    cut = pieces(copies, source, buckets)
    for bucket, each in zip(buckets, cut, strict=True):
        place(each, data[bucket.start : bucket.stop].copy(), target, found)

    np.testing.assert_array_equal(found, expected)
    placed = sum(
        math.prod(s.stop - s.start for s in piece.inner) * piece.item_size
        for each in cut
        for piece in each
    )
    assert placed == sum(rectangle.size for rectangle in target.rectangles)


@given(st.integers(1, 5000), st.integers(1, 20).map(lambda n: n * 64))
def test_packed_buckets_cover_all_bytes_in_as_few_launches_as_can_be(size: int, most: int) -> None:
    buckets = packed(size, most)

    assert buckets[0].start == 0
    assert buckets[-1].stop == size
    assert all(a.stop == b.start for a, b in pairwise(buckets))
    assert len(buckets) == -(-size // most)


def test_a_launch_for_each_tensor_leaves_out_what_lies_between_them() -> None:
    layout = whole({"a": ("float32", (3,)), "b": ("uint8", (5,))})

    assert one_each(layout) == (Bucket(0, 12), Bucket(64, 69))


@pytest.mark.parametrize("size", [0, -64, 63, 100])
def test_a_bucket_that_could_cut_an_element_is_refused(size: int) -> None:
    with pytest.raises(InvalidFieldError, match="bucket_bytes: expected a positive multiple of 64"):
        packed(1000, size)


def test_time_grows_with_the_tensors_and_not_with_their_square() -> None:
    layout = whole({f"t{i}": ("bfloat16", (4,)) for i in range(18_000)})

    cut = pieces(plan(layout, layout), layout, packed(layout.size(), 1 << 16))

    assert sum(map(len, cut)) == 18_000
