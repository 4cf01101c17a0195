"""Deltas: lossless whatever changed, small where little did, and chosen where they arrive first."""

import json
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError
from treadle_weights.delta import Rates, apply, decode, encode, estimate, is_delta_faster
from treadle_weights.digests import layout_digests
from treadle_weights.layouts import Layout, Rectangle, whole
from treadle_weights.plan import execute, plan
from treadle_weights.transport import ArenaCorruptError

LAYOUT = whole(
    {"a": ("bfloat16", (40, 70)), "b": ("float32", (9,)), "c": ("uint8", ()), "d": ("int64", (3,))}
)
CUT = Layout(
    (
        Rectangle("d", "int64", (3,), (0,), (3,), 0),
        Rectangle("a", "bfloat16", (40, 70), (0, 30), (40, 70), 24),
        Rectangle("a", "bfloat16", (40, 70), (0, 0), (40, 30), 3224),
    )
)


def versions(seed: int, share: float, layout: Layout = LAYOUT) -> tuple[Any, Any]:
    """Two versions of which so many bytes differ."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, layout.size(), np.uint8)
    new = base.copy()
    changed = rng.random(base.size) < share
    new[changed] ^= rng.integers(1, 256, int(changed.sum()), np.uint8)
    return base, new


@given(st.integers(0, 2**20), st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]))
@pytest.mark.parametrize("target", [LAYOUT, CUT], ids=["same", "cut"])
def test_what_is_applied_is_the_new_version_bit_for_bit(
    target: Layout, seed: int, share: float
) -> None:
    base, new = versions(seed, share)
    copies = plan(LAYOUT, target)
    buffer, expected = np.zeros(target.size(), np.uint8), np.zeros(target.size(), np.uint8)
    execute(copies, LAYOUT, target, base, buffer)
    execute(copies, LAYOUT, target, new, expected)

    data = encode(LAYOUT, base, new, layout_digests(LAYOUT, base))
    for _ in range(2):  # values, not differences: once more changes nothing
        apply(decode(data, LAYOUT.tensors), target, buffer)

    np.testing.assert_array_equal(buffer, expected)
    assert layout_digests(target, buffer) == {
        name: digest
        for name, digest in layout_digests(LAYOUT, new).items()
        if name in target.by_tensor
    }


def test_bits_are_values_whatever_they_stand_for() -> None:
    layout = whole({"a": ("float32", (4,))})
    base = np.array([0.0, 1.0, np.nan, 2.0], np.float32)
    new = np.array([-0.0, 1.0, np.nan, np.inf], np.float32)
    new.view(np.uint32)[2] = 0xFFC00001  # another NaN
    buffer = base.view(np.uint8).copy()

    data = encode(layout, base.view(np.uint8), new.view(np.uint8), {"a": 7})
    changes = decode(data, layout.tensors)
    apply(changes, layout, buffer)

    assert changes["a"].indices.tolist() == [0, 2, 3]
    assert changes["a"].base == 7
    assert bytes(buffer) == new.tobytes()


@pytest.mark.parametrize("share", [0.01, 0.003, 0.00001])
def test_one_percent_changed_is_at_least_33_times_smaller(share: float) -> None:
    layout = whole({f"t{i}": ("bfloat16", (512, 512)) for i in range(4)})
    rng = np.random.default_rng(5)
    base = rng.integers(0, 256, layout.size(), np.uint8)
    new = base.copy()
    items = new.view(np.uint16)
    chosen = rng.choice(items.size, round(items.size * share), replace=False)
    items[chosen] ^= 1

    data = encode(layout, base, new, layout_digests(layout, base))

    assert layout.size() / data.size >= 33
    buffer = base.copy()
    apply(decode(data, layout.tensors), layout, buffer)
    np.testing.assert_array_equal(buffer, new)
    assert estimate(layout, base, new) == pytest.approx(data.size, rel=0.25, abs=500)


@pytest.mark.parametrize("gap", [0, 254, 255, 256, 509, 510, 65_534, 65_535, 65_536, 200_000])
def test_gaps_of_every_size_come_back(gap: int) -> None:
    layout = whole({"a": ("uint8", (gap + 2,))})
    base, new = np.zeros(layout.size(), np.uint8), np.zeros(layout.size(), np.uint8)
    new[[0, gap + 1]] = 1

    changes = decode(encode(layout, base, new, {"a": 1}), layout.tensors)

    assert changes["a"].indices.tolist() == [0, gap + 1]


def test_a_tensor_in_parts_has_no_delta() -> None:
    with pytest.raises(InvalidFieldError, match=r"a: expected whole, \[40, 70\]"):
        encode(CUT, np.zeros(6000, np.uint8), np.zeros(6000, np.uint8), {"a": 1, "d": 1})


def bad(header: Any, body: bytes = b"") -> np.ndarray[Any, Any]:
    text = json.dumps(header).encode()
    return np.frombuffer(struct.pack("<Q", len(text)) + text + body, np.uint8)


D = "0" * 16


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(np.zeros(3, np.uint8), id="short"),
        pytest.param(np.frombuffer(struct.pack("<Q", 2**40), np.uint8), id="header-too-long"),
        pytest.param(np.frombuffer(struct.pack("<Q", 2) + b"x{", np.uint8), id="no-json"),
        pytest.param(bad({}), id="no-list"),
        pytest.param(bad([1]), id="no-entry"),
        pytest.param(bad([["c", D, 1, 1]]), id="entry-short"),
        pytest.param(bad([["x", D, 1, 1, 1]], b"\0\1"), id="unknown-tensor"),
        pytest.param(bad([["c", "zz", 1, 1, 1]], b"\0\1"), id="no-digest"),
        pytest.param(bad([["c", D, -1, 1, 1]], b"\0\1"), id="negative"),
        pytest.param(bad([["c", D, True, 1, 1]], b"\0\1"), id="bool"),
        pytest.param(bad([["c", D, 0, 1, 0]]), id="nothing-changed"),
        pytest.param(bad([["c", D, 1, 3, 1]], b"\0\1"), id="width"),
        pytest.param(bad([["c", D, 1, 1, 1]], b"\0"), id="values-missing"),
        pytest.param(bad([["c", D, 1, 1, 1]], b"\1\1"), id="beyond-the-tensor"),
        pytest.param(bad([["c", D, 1, 1, 1]], b"\xff\1"), id="gap-without-end"),
        pytest.param(bad([["c", D, 1, 1, 1]], b"\0\1\2"), id="more-than-stated"),
        pytest.param(bad([["c", D, 1, 1, 1], ["c", D, 1, 1, 1]], b"\0\1\0\1"), id="twice"),
    ],
)
def test_what_encode_never_writes_is_refused(data: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ArenaCorruptError):
        decode(data, LAYOUT.tensors)


@given(st.integers(0, 2**16), st.integers(0, 10_000), st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_found_by_the_digest(seed: int, at: int, bits: int) -> None:
    base, new = versions(seed, 0.01)
    data = encode(LAYOUT, base, new, layout_digests(LAYOUT, base))
    harmed = data.copy()
    harmed[at % data.size] ^= bits
    buffer = base.copy()
    try:
        changes = decode(harmed, LAYOUT.tensors)
    except ArenaCorruptError:
        return
    apply(changes, LAYOUT, buffer)
    same = layout_digests(LAYOUT, buffer) == layout_digests(LAYOUT, new)
    digests = {name: change.base for name, change in changes.items()}
    stated = {name: c.base for name, c in decode(data, LAYOUT.tensors).items()}
    assert not same or digests != stated


@pytest.mark.parametrize(
    ("link", "faster"),
    [pytest.param(1e8, True, id="slow-link"), pytest.param(5e9, False, id="fast-link")],
)
def test_the_faster_way_is_chosen(link: float, *, faster: bool) -> None:
    # dense: 1e9 / link, 10 s and 0.2 s; delta: 1e9 / 1e9 + 3e7 / link, 1.3 s and 1.006 s.
    assert is_delta_faster(10**9, 3 * 10**7, Rates(link, 1e9)) is faster
