import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle_core.errors import InvalidFieldError
from treadle_weights.boxes import Box, intersect, intersecting
from treadle_weights.digests import combine, layout_digests
from treadle_weights.layouts import ITEM_SIZES, Layout, Rectangle, whole
from treadle_weights.plan import Copy, LayoutMismatchError, box_of, execute, plan

Shapes = dict[str, tuple[str, tuple[int, ...]]]
Tensors = dict[str, NDArray[Any]]
DTYPES = ("float32", "bfloat16", "float8_e5m2", "int64")
UNWRITTEN = 0xA5


@st.composite
def shapes_of_tensors(draw: st.DrawFn) -> Shapes:
    return {
        f"layers.{index}.weight": (
            draw(st.sampled_from(DTYPES)),
            tuple(draw(st.lists(st.integers(1, 6), max_size=3))),
        )
        for index in range(draw(st.integers(1, 3)))
    }


def split(draw: st.DrawFn, box: Box) -> list[Box]:
    start, stop = box
    axes = [axis for axis in range(len(start)) if stop[axis] - start[axis] > 1]
    if not axes or draw(st.integers(0, 2)) == 0:
        return [box]
    axis = draw(st.sampled_from(axes))
    at = draw(st.integers(start[axis] + 1, stop[axis] - 1))
    low = (start, (*stop[:axis], at, *stop[axis + 1 :]))
    high = ((*start[:axis], at, *start[axis + 1 :]), stop)
    return split(draw, low) + split(draw, high)


@st.composite
def layouts(draw: st.DrawFn, shapes: Shapes) -> Layout:
    """Any partition of the tensors over up to three ranks, with gaps between rectangles."""
    pieces = [
        (name, dtype, shape, box)
        for name, (dtype, shape) in shapes.items()
        for box in split(draw, ((0,) * len(shape), shape))
    ]
    ends = dict.fromkeys(range(draw(st.integers(1, 3))), 0)
    rectangles = []
    for name, dtype, shape, (start, stop) in draw(st.permutations(pieces)):
        rank = draw(st.sampled_from(sorted(ends)))
        offset = -(-ends[rank] // 8) * 8 + draw(st.integers(0, 2)) * ITEM_SIZES[dtype]
        rectangles.append(Rectangle(name, dtype, shape, start, stop, offset, rank))
        ends[rank] = rectangles[-1].end
    return Layout(tuple(rectangles))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Layout, Layout]:
    shapes = draw(shapes_of_tensors())
    return draw(layouts(shapes)), draw(layouts(shapes))


def tensors_of(layout: Layout) -> Tensors:
    rng = np.random.default_rng(7)
    tensors: Tensors = {}
    for name, indices in layout.by_tensor.items():
        first = layout.rectangles[indices[0]]
        size = ITEM_SIZES[first.dtype]
        data = rng.bytes(int(np.prod(first.shape, dtype=int)) * size)
        tensors[name] = np.frombuffer(data, f"u{size}").reshape(first.shape)
    return tensors


def buffers_of(layout: Layout, tensors: Tensors | None = None) -> dict[int, NDArray[np.uint8]]:
    """Each rank's buffer with its boxes of the tensors, or with nothing written."""
    ranks = {rectangle.rank for rectangle in layout.rectangles}
    buffers = {rank: np.full(layout.size(rank), UNWRITTEN, np.uint8) for rank in ranks}
    for r in layout.rectangles if tensors else ():
        box = tuple(slice(a, b) for a, b in zip(r.start, r.stop, strict=True))
        box_of(buffers[r.rank], r)[...] = tensors[r.tensor][box]
    return buffers


def move(source: Layout, target: Layout, sent: dict[int, NDArray[np.uint8]]) -> Any:
    copies, arrived = plan(source, target), buffers_of(target)
    for source_rank, one in sent.items():
        for target_rank, other in arrived.items():
            execute(
                copies, source, target, one, other, source_rank=source_rank, target_rank=target_rank
            )
    return arrived


@settings(max_examples=60)
@given(sides())
def test_any_sharding_reaches_any_other_bit_for_bit(given_sides: tuple[Layout, Layout]) -> None:
    source, target = given_sides
    tensors = tensors_of(source)

    arrived = move(source, target, buffers_of(source, tensors))

    expected = buffers_of(target, tensors)
    assert arrived.keys() == expected.keys()
    for rank, buffer in arrived.items():
        np.testing.assert_array_equal(buffer, expected[rank])


@settings(max_examples=60)
@given(sides())
def test_every_target_element_is_written_exactly_once(given_sides: tuple[Layout, Layout]) -> None:
    source, target = given_sides

    counts = {name: np.zeros(t.shape, int) for name, t in tensors_of(target).items()}
    for copy in plan(source, target):
        box = tuple(slice(a, b) for a, b in zip(copy.start, copy.stop, strict=True))
        counts[copy.tensor][box] += 1

    assert all(np.all(count == 1) for count in counts.values())


@settings(max_examples=60)
@given(sides())
def test_digests_of_parts_add_up_whatever_the_sharding(given_sides: tuple[Layout, Layout]) -> None:
    sums = []
    for layout in given_sides:
        buffers = buffers_of(layout, tensors_of(given_sides[0]))
        parts = [layout_digests(layout, buffer, rank) for rank, buffer in buffers.items()]
        sums.append({n: combine(part.get(n, 0) for part in parts) for n in layout.by_tensor})

    assert sums[0] == sums[1]


@given(sides(), st.data())
def test_two_sides_that_differ_name_the_tensor(
    given_sides: tuple[Layout, Layout], data: st.DataObject
) -> None:
    source, target = given_sides
    name = data.draw(st.sampled_from(sorted(source.by_tensor)))
    others = tuple(r for r in source.rectangles if r.tensor != name)
    old = source.rectangles[source.by_tensor[name][0]]
    dtype, shape = data.draw(
        st.sampled_from([("float16", old.shape), (old.dtype, (*old.shape, 2)), (None, ())])
    )
    if dtype:
        others += (Rectangle(name, dtype, shape, (0,) * len(shape), shape, 0, rank=9),)

    with pytest.raises(LayoutMismatchError) as raised:
        plan(Layout(others), target)
    assert raised.value.field == name


def test_a_receiver_may_want_less_than_is_sent() -> None:
    source = whole({"a": ("float32", (2,)), "b": ("float32", (3,))})
    target = whole({"b": ("float32", (3,))})

    assert [copy.tensor for copy in plan(source, target)] == ["b"]


@given(st.lists(st.tuples(*[st.integers(0, 12)] * 4), min_size=1, max_size=40), st.integers(0, 99))
def test_the_sweep_finds_the_pairs_that_a_comparison_of_all_finds(
    corners: list[tuple[int, int, int, int]], cut: int
) -> None:
    boxes: list[Box] = [((a, b), (a + 1 + c % 5, b + 1 + d % 5)) for a, b, c, d in corners]
    ones, others = boxes, boxes[cut % len(boxes) :] + boxes

    pairs = intersecting(ones, others)

    assert pairs == [
        (i, j)
        for i, one in enumerate(ones)
        for j, other in enumerate(others)
        if intersect(one, other)
    ]


def tiny(count: int) -> Layout:
    return whole({f"layers.{index}.bias": ("bfloat16", (8,)) for index in range(count)})


def sharded(parts: int, axis: int) -> Layout:
    """One fused tensor in equal parts along an axis, each on a rank of its own."""
    shape = (1 << 15, 1 << 15)
    step = shape[axis] // parts
    rectangles = []
    for part in range(parts):
        start, stop = [0, 0], list(shape)
        start[axis], stop[axis] = part * step, (part + 1) * step
        rectangles.append(
            Rectangle("experts", "bfloat16", shape, tuple(start), tuple(stop), 0, part)
        )
    return Layout(tuple(rectangles))


@pytest.mark.parametrize(
    ("build", "size"),
    [
        pytest.param(lambda n: (tiny(n),) * 2, 4500, id="many-tiny-tensors"),
        pytest.param(lambda n: (sharded(n, 0), sharded(n // 2, 0)), 1024, id="one-fused-tensor"),
    ],
)
def test_planning_time_is_near_linear_in_the_rectangles(build: Any, size: int) -> None:
    def seconds(n: int) -> float:
        source, target = build(n)
        taken = []
        for _ in range(2):
            begin = time.process_time()
            plan(source, target)
            taken.append(time.process_time() - begin)
        return min(taken)

    once, four_times = seconds(size), seconds(4 * size)

    assert four_times < 8 * once
    assert four_times < 1.0


def test_shards_along_different_axes_meet_in_all_pairs() -> None:
    assert len(plan(sharded(64, 0), sharded(32, 1))) == 64 * 32


COPY = Copy("a", "float32", (0,), (4,), 0, 0, 0, 0)


@pytest.mark.parametrize(
    "copy",
    [
        pytest.param(Copy("a", "float32", (0,), (4,), 0, 1, 0, 0), id="no-such-source"),
        pytest.param(Copy("a", "float32", (0,), (4,), 0, 0, 0, -1), id="negative-target"),
        pytest.param(Copy("a", "float32", (0,), (5,), 0, 0, 0, 0), id="beyond-the-tensor"),
        pytest.param(Copy("a", "float32", (-1,), (3,), 0, 0, 0, 0), id="before-the-tensor"),
        pytest.param(Copy("a", "float32", (3,), (3,), 0, 0, 0, 0), id="empty"),
        pytest.param(Copy("a", "float32", (0, 0), (4, 1), 0, 0, 0, 0), id="more-axes"),
        pytest.param(Copy("b", "float32", (0,), (4,), 0, 0, 0, 0), id="another-tensor"),
        pytest.param(Copy("a", "bfloat16", (0,), (4,), 0, 0, 0, 0), id="another-dtype"),
    ],
)
def test_a_copy_of_other_layouts_is_refused_before_any_byte_moves(copy: Copy) -> None:
    layout = whole({"a": ("float32", (4,))})
    sent, arrived = np.ones(16, np.uint8), np.zeros(16, np.uint8)

    with pytest.raises(InvalidFieldError):
        execute([COPY, copy], layout, layout, sent, arrived)
    assert not arrived.any()


@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(np.zeros(15, np.uint8), id="short"),
        pytest.param(np.zeros(16, np.float32), id="not-bytes"),
        pytest.param(np.zeros(32, np.uint8)[::2], id="strided"),
        pytest.param(np.zeros((4, 4), np.uint8), id="not-flat"),
    ],
)
def test_a_buffer_that_does_not_hold_the_layout_is_refused(buffer: NDArray[Any]) -> None:
    layout = whole({"a": ("float32", (4,))})
    good = np.zeros(16, np.uint8)

    with pytest.raises(InvalidFieldError, match="source_bytes"):
        execute([COPY], layout, layout, buffer, good)
    with pytest.raises(InvalidFieldError, match="target_bytes"):
        execute([COPY], layout, layout, good, buffer)
