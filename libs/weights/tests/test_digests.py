import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError
from treadle_weights.digests import GOLDEN, hex_digest, tensor_digest, weights_digest
from treadle_weights.layouts import ITEM_SIZES, Rectangle, whole

MASK = 2**64 - 1
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float64")


def mix(x: int) -> int:
    """The finaliser of splitmix64, written down once more."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def only(dtype: str, *shape: int) -> Rectangle:
    return whole({"a": (dtype, shape)}).rectangles[0]


@st.composite
def boxes(draw: st.DrawFn) -> Rectangle:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    start = tuple(draw(st.integers(0, size - 1)) for size in shape)
    stop = tuple(draw(st.integers(a + 1, size)) for a, size in zip(start, shape, strict=True))
    return Rectangle("a", draw(st.sampled_from(DTYPES)), shape, start, stop, 0)


@given(boxes(), st.integers(0, 2**32))
def test_a_digest_is_the_sum_of_the_mixes_of_index_and_bits(box: Rectangle, seed: int) -> None:
    size = ITEM_SIZES[box.dtype]
    data = np.frombuffer(np.random.default_rng(seed).bytes(box.size), np.uint8)

    digest = tensor_digest(data, box)

    places = np.arange(int(np.prod(box.shape, dtype=int))).reshape(box.shape)
    inside = places[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
    bits = data.view(f"u{size}").tolist()
    expected = sum(
        mix((int(i) * GOLDEN + b) & MASK) for i, b in zip(inside.flat, bits, strict=True)
    )
    assert digest == expected & MASK


@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    [
        pytest.param((100_000,), (0,), (100_000,), id="whole"),
        pytest.param((3, 50_000), (1, 7), (3, 49_993), id="long-rows"),
        pytest.param((50_000, 9), (3, 4), (49_999, 5), id="one-column"),
        pytest.param((40, 50, 60), (1, 2, 3), (39, 49, 58), id="inner-box"),
    ],
)
def test_blocks_do_not_show(
    shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...]
) -> None:
    whole_tensor = np.random.default_rng(1).integers(0, 2**32, shape, np.uint32)
    inside = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
    box = Rectangle("a", "float32", shape, start, stop, 0)

    digest = tensor_digest(np.ascontiguousarray(whole_tensor[inside]), box)

    outside = whole_tensor.copy()
    outside[inside] = 0
    inner = whole_tensor.copy()
    inner[inside] = 0
    rest = tensor_digest(outside, only("float32", *shape))
    zeros = tensor_digest(np.zeros_like(outside), only("float32", *shape))
    zero_box = tensor_digest(np.zeros_like(whole_tensor[inside]), box)
    everything = tensor_digest(whole_tensor, only("float32", *shape))
    assert (rest - zero_box + digest) & MASK == everything
    assert zeros != everything


tensors = st.tuples(
    st.sampled_from(DTYPES), st.integers(2, 300), st.integers(0, 2**32), st.booleans()
)


def bits_of(dtype: str, size: int, seed: int, *, few_values: bool) -> np.ndarray:
    rng = np.random.default_rng(seed)
    unsigned = np.dtype(f"u{ITEM_SIZES[dtype]}")
    if few_values:  # as weights are: many zeros and repeated values
        return rng.choice(np.array([0, 0, 1, 0x3F, 0x80], unsigned), size)
    return np.frombuffer(rng.bytes(size * unsigned.itemsize), unsigned).copy()


@given(tensors, st.data())
def test_every_single_bit_counts(tensor: tuple[str, int, int, bool], data: st.DataObject) -> None:
    dtype, size, seed, few = tensor
    bits = bits_of(dtype, size, seed, few_values=few)
    before = tensor_digest(bits, only(dtype, size))
    at = data.draw(st.integers(0, size - 1))
    bits[at] ^= bits.dtype.type(1 << data.draw(st.integers(0, bits.itemsize * 8 - 1)))

    assert tensor_digest(bits, only(dtype, size)) != before


@given(tensors, st.data())
def test_opposite_flips_do_not_cancel(
    tensor: tuple[str, int, int, bool], data: st.DataObject
) -> None:
    dtype, size, seed, few = tensor
    bits = bits_of(dtype, size, seed, few_values=few)
    bit = bits.dtype.type(1 << data.draw(st.integers(0, bits.itemsize * 8 - 1)))
    one, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    bits[one] |= bit
    bits[other] &= ~bit
    before = tensor_digest(bits, only(dtype, size))
    bits[one] ^= bit
    bits[other] ^= bit

    assert tensor_digest(bits, only(dtype, size)) != before


@given(tensors, st.data())
def test_swaps_and_shifts_are_found(
    tensor: tuple[str, int, int, bool], data: st.DataObject
) -> None:
    dtype, size, seed, few = tensor
    bits = bits_of(dtype, size, seed, few_values=few)
    one, other = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    swapped = bits.copy()
    swapped[[one, other]] = bits[[other, one]]
    shifted = np.roll(bits, data.draw(st.integers(1, size - 1)))

    for changed in (swapped, shifted):
        assume(not np.array_equal(changed, bits))
        assert tensor_digest(changed, only(dtype, size)) != tensor_digest(bits, only(dtype, size))


def test_the_same_bytes_in_another_shape_with_the_same_order_are_the_same_tensor() -> None:
    data = np.arange(24, dtype=np.uint32)

    assert tensor_digest(data, only("float32", 24)) == tensor_digest(data, only("float32", 4, 6))


def test_memory_is_bounded_whatever_the_size() -> None:
    data = np.zeros(1 << 22, np.uint32)
    column = Rectangle("a", "float32", (1 << 22, 2), (0, 1), (1 << 22, 2), 0)

    tracemalloc.start()
    tensor_digest(data, only("float32", 1 << 22))
    tensor_digest(data, column)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 4_000_000


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(np.zeros(3, np.uint32), id="short"),
        pytest.param(np.zeros(8, np.uint32)[::2], id="strided"),
    ],
)
def test_data_of_another_size_is_refused(data: np.ndarray) -> None:
    with pytest.raises(InvalidFieldError, match="a: expected 16 contiguous bytes"):
        tensor_digest(data, only("float32", 4))


def test_the_digest_of_all_weights_depends_on_names_and_digests_not_on_order() -> None:
    digest = weights_digest({"a": 1, "b": 2})

    assert len(digest) == 16
    assert int(digest, 16) >= 0
    assert weights_digest({"b": 2, "a": 1}) == digest
    assert weights_digest({"a": 2, "b": 1}) != digest
    assert weights_digest({"a": 1, "c": 2}) != digest
    assert hex_digest(1) == "0000000000000001"
