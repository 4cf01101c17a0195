import pytest

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle_core.errors import InvalidFieldError
from treadle_weights.layouts import Layout, Rectangle, whole
from treadle_weights.plan import plan
from treadle_weights.transport import Arena, LoadOrder
from treadle_weights.wire import (
    digests_from_wire,
    layout_from_wire,
    layout_to_wire,
    load_order_from_wire,
    load_order_to_wire,
)

SOURCE = whole({"a": ("float32", (4, 6)), "b": ("bfloat16", ())})
TARGET = Layout(
    (
        Rectangle("a", "float32", (4, 6), (0, 3), (4, 6), 8, 1),
        Rectangle("a", "float32", (4, 6), (0, 0), (4, 3), 0, 0),
        Rectangle("b", "bfloat16", (), (), (), 0, 2),
    )
)


@pytest.mark.parametrize("layout", [SOURCE, TARGET, Layout(())])
def test_a_layout_comes_back_from_the_wire(layout: Layout) -> None:
    assert layout_from_wire(pb.Layout.FromString(layout_to_wire(layout).SerializeToString())) == (
        layout
    )


def test_a_load_order_comes_back_from_the_wire() -> None:
    order = LoadOrder(
        3,
        Arena("/shm/treadle.run.3", 112),
        SOURCE,
        plan(SOURCE, TARGET),
        {"a": 2**64 - 1, "b": 0},
    )

    message = pb.LoadOrder.FromString(load_order_to_wire(order).SerializeToString())

    assert load_order_from_wire(message) == order


def test_a_layout_from_the_wire_is_checked() -> None:
    message = layout_to_wire(SOURCE)
    message.rectangles[0].shape[0] = 2**62

    with pytest.raises(InvalidFieldError, match=r"a\.shape"):
        layout_from_wire(message)


@pytest.mark.parametrize("digest", ["", "0", "0" * 17, "F" * 16, "0x" + "0" * 14, "-" + "0" * 15])
def test_a_digest_that_is_not_16_hex_digits_is_refused(digest: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"digests\[a\]"):
        digests_from_wire({"a": digest})
