from typing import Any

import pytest

from treadle_core.errors import InvalidFieldError
from treadle_weights.layouts import ALIGNMENT, Layout, Rectangle, whole


def rectangle(**changes: Any) -> Rectangle:
    values = {
        "tensor": "a",
        "dtype": "float32",
        "shape": (4, 6),
        "start": (0, 0),
        "stop": (4, 6),
        "offset": 0,
    }
    return Rectangle(**(values | changes))


def test_whole_tensors_lie_in_order_at_aligned_offsets() -> None:
    layout = whole({"b": ("bfloat16", (3, 5)), "a": ("float32", ()), "c": ("bool", [7])})

    assert [(r.tensor, r.offset, r.size) for r in layout.rectangles] == [
        ("b", 0, 30),
        ("a", ALIGNMENT, 4),
        ("c", 2 * ALIGNMENT, 7),
    ]
    assert layout.size() == 2 * ALIGNMENT + 7
    assert layout.size(rank=1) == 0


def test_a_tensor_without_elements_gets_no_place() -> None:
    assert whole({"a": ("float32", (0, 4))}) == Layout(())


def test_equal_layouts_are_one_key() -> None:
    one, other = (whole({"a": ("float32", (2,))}) for _ in range(2))

    assert {one: "plan"}[other] == "plan"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        pytest.param({"tensor": ""}, "tensor", id="no-name"),
        pytest.param({"dtype": "complex64"}, "a.dtype", id="unknown-dtype"),
        pytest.param({"start": (0,)}, "a.start", id="axes-of-start"),
        pytest.param({"stop": (4, 6, 1)}, "a.start", id="axes-of-stop"),
        pytest.param({"start": (-1, 0)}, "a.stop", id="before-the-tensor"),
        pytest.param({"stop": (4, 7)}, "a.stop", id="beyond-the-tensor"),
        pytest.param({"start": (2, 0), "stop": (2, 6)}, "a.stop", id="empty"),
        pytest.param({"start": (3, 0), "stop": (2, 6)}, "a.stop", id="reversed"),
        pytest.param({"offset": -4}, "a.offset", id="negative-offset"),
        pytest.param({"offset": 2}, "a.offset", id="odd-offset"),
        pytest.param({"rank": -1}, "a.rank", id="negative-rank"),
        pytest.param({"shape": (2**60, 6)}, "a.shape", id="2^60-rows"),
        pytest.param({"offset": 2**63}, "a.shape", id="offset-beyond-64-bits"),
    ],
)
def test_a_rectangle_that_cannot_be_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        rectangle(**changes)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("rectangles", "field"),
    [
        pytest.param([{"stop": (4, 5)}], "a", id="gap"),
        pytest.param([{}, {"rank": 1}], "a", id="twice"),
        pytest.param(
            [{"stop": (2, 6)}, {"start": (1, 0), "stop": (3, 6), "rank": 1}], "a", id="overlap"
        ),
        pytest.param(
            [{"stop": (2, 6)}, {"start": (2, 0), "rank": 1, "dtype": "int32"}], "a", id="dtypes"
        ),
        pytest.param(
            [{"stop": (2, 6)}, {"start": (2, 0), "rank": 1, "shape": (4, 7)}], "a", id="shapes"
        ),
        pytest.param([{}, {"tensor": "b", "offset": 92}], "b.offset", id="shared-bytes"),
    ],
)
def test_a_layout_that_is_no_partition_is_refused(
    rectangles: list[dict[str, Any]], field: str
) -> None:
    with pytest.raises(InvalidFieldError) as raised:
        Layout(tuple(rectangle(**changes) for changes in rectangles))
    assert raised.value.field == field


def test_an_overlap_that_a_gap_of_the_same_size_hides_is_found_among_many() -> None:
    rows = [((row, 0), (row + 1, 6)) for row in range(100)]
    rows[40] = rows[39]

    with pytest.raises(InvalidFieldError, match="meets"):
        Layout(
            tuple(
                rectangle(shape=(100, 6), start=start, stop=stop, rank=rank)
                for rank, (start, stop) in enumerate(rows)
            )
        )
