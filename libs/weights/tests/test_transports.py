"""What every WeightTransport keeps."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError
from treadle_weights.files import Files
from treadle_weights.layouts import Layout, Rectangle, whole
from treadle_weights.plan import box_of, plan
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.transport import (
    Arena,
    ArenaCorruptError,
    ArenaFullError,
    ArenaMissingError,
    LoadOrder,
    WeightTransport,
)

SOURCE = whole({"a": ("float32", (4, 6)), "b": ("bfloat16", (5,)), "c": ("float32", ())})
TARGET = Layout(
    (
        Rectangle("b", "bfloat16", (5,), (0,), (5,), 0),
        Rectangle("a", "float32", (4, 6), (0, 3), (4, 6), 12),
        Rectangle("a", "float32", (4, 6), (0, 0), (4, 3), 60),
        Rectangle("c", "float32", (), (), (), 108),
    )
)


@pytest.fixture(params=[SharedMemory, Files], ids=["shared_memory", "files"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> WeightTransport:
    return request.param(tmp_path)


def tensors(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.random((4, 6), np.float32),
        "b": rng.integers(0, 2**16, 5, np.uint16),
        "c": rng.random((), np.float32),
    }


def order_of(arena: Arena, digests: dict[str, int], version: int = 1) -> LoadOrder:
    return LoadOrder(version, arena, SOURCE, plan(SOURCE, TARGET), digests)


def received(
    transport: WeightTransport, arena: Arena, digests: dict[str, int]
) -> dict[str, np.ndarray[Any, Any]]:
    """What arrives, put together again."""
    buffer = np.zeros(TARGET.size(), np.uint8)
    transport.receiver().receive(order_of(arena, digests), TARGET, buffer)
    b, right, left, c = (box_of(buffer, rectangle) for rectangle in TARGET.rectangles)
    a = np.hstack((left.view(np.float32), right.view(np.float32)))
    return {"a": a, "b": b, "c": c.view(np.float32)}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in SOURCE.by_tensor:
        np.testing.assert_array_equal(one[name], other[name])


def test_a_version_arrives_bit_for_bit_in_another_layout(transport: WeightTransport) -> None:
    arena = transport.arena("run", 1, SOURCE.size())
    assert transport.arena("run", 1, SOURCE.size()) == arena
    digests = transport.sender("run").send(arena, SOURCE, tensors().items())

    assert_same(received(transport, arena, digests), tensors())


def test_a_sharded_sender_reaches_a_sharded_receiver(transport: WeightTransport) -> None:
    layout = Layout(
        (
            Rectangle("a", "float32", (4, 6), (0, 0), (1, 6), 0),
            Rectangle("a", "float32", (4, 6), (1, 0), (4, 6), 24),
            Rectangle("b", "bfloat16", (5,), (0,), (2,), 96),
            Rectangle("b", "bfloat16", (5,), (2,), (5,), 100),
            Rectangle("c", "float32", (), (), (), 108),
        )
    )
    arena = transport.arena("run", 1, layout.size())
    digests = transport.sender("run").send(arena, layout, tensors().items())
    buffer = np.zeros(TARGET.size(), np.uint8)

    order = LoadOrder(1, arena, layout, plan(layout, TARGET), digests)
    transport.receiver().receive(order, TARGET, buffer)
    np.testing.assert_array_equal(box_of(buffer, TARGET.rectangles[0]), tensors()["b"])


def test_sending_again_overwrites(transport: WeightTransport, tmp_path: Path) -> None:
    arena, sender = transport.arena("run", 1, SOURCE.size()), transport.sender("run")
    sender.send(arena, SOURCE, tensors(1).items())

    digests = sender.send(arena, SOURCE, tensors(2).items())

    assert_same(received(transport, arena, digests), tensors(2))
    assert list(tmp_path.iterdir()) == [Path(arena.path)]


def test_what_is_discarded_is_gone_and_what_is_kept_stays(transport: WeightTransport) -> None:
    sender = transport.sender("run")
    first, second, third = (transport.arena("run", version, 112 * 2) for version in (1, 2, 3))
    for arena in (first, second, third):
        digests = sender.send(arena, SOURCE, tensors().items())

    sender.discard(second)
    sender.discard(second)
    sender.keep(third)
    sender.keep(third)

    assert_same(received(transport, third, digests), tensors())
    for arena in (first, second):
        with pytest.raises(ArenaMissingError):
            received(transport, arena, digests)


def test_an_alias_is_the_bytes_of_its_base_and_moves_none(transport: WeightTransport) -> None:
    sender = transport.sender("run")
    base = transport.arena("run", 1, SOURCE.size())
    digests = sender.send(base, SOURCE, tensors().items())
    sender.keep(base)

    alias = transport.alias("run", 2, base)
    assert transport.alias("run", 2, base) == alias
    sender.keep(alias)

    assert_same(received(transport, alias, digests), tensors())
    assert os.stat(alias.path).st_ino == os.stat(base.path).st_ino  # noqa: PTH116


def test_what_is_gone_is_the_base_of_no_alias(transport: WeightTransport) -> None:
    with pytest.raises(ArenaMissingError):
        transport.alias("run", 2, transport.arena("run", 1, SOURCE.size()))
    assert transport.find("run", 2) is None


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_flipped_bit_names_its_tensor(transport: WeightTransport, data: st.DataObject) -> None:
    sender = transport.sender("run")
    arena = transport.arena("run", 1, SOURCE.size())
    digests = sender.send(arena, SOURCE, tensors().items())
    name = data.draw(st.sampled_from(sorted(SOURCE.by_tensor)))
    content = bytearray(Path(arena.path).read_bytes())
    at = content.index(tensors()[name].tobytes())
    at += data.draw(st.integers(0, tensors()[name].nbytes - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    Path(arena.path).write_bytes(content)

    with pytest.raises(ArenaCorruptError) as raised:
        received(transport, arena, digests)
    assert raised.value.field == name
    sender.discard(arena)
    sender.close()


def test_a_plan_that_misses_a_tensor_is_found_by_what_arrived(transport: WeightTransport) -> None:
    arena = transport.arena("run", 1, SOURCE.size())
    digests = transport.sender("run").send(arena, SOURCE, tensors().items())
    copies = tuple(copy for copy in plan(SOURCE, TARGET) if copy.tensor != "b")
    order = LoadOrder(1, arena, SOURCE, copies, digests)

    with pytest.raises(ArenaCorruptError, match="b has another digest"):
        transport.receiver().receive(order, TARGET, np.zeros(112, np.uint8))


def test_a_tensor_without_an_expected_digest_is_not_trusted(transport: WeightTransport) -> None:
    arena = transport.arena("run", 1, SOURCE.size())
    digests = transport.sender("run").send(arena, SOURCE, tensors().items())
    del digests["c"]

    with pytest.raises(ArenaCorruptError, match="c has another digest"):
        received(transport, arena, digests)


@pytest.mark.parametrize("size", [0, 7, 100, 4096])
def test_bytes_of_another_size_are_refused(transport: WeightTransport, size: int) -> None:
    arena = transport.arena("run", 1, SOURCE.size())
    Path(arena.path).write_bytes(bytes(size))

    with pytest.raises(ArenaCorruptError):
        received(transport, arena, {})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        pytest.param({"a": None}, "a", id="missing"),
        pytest.param({"d": np.zeros(1, np.float32)}, "d", id="unknown"),
        pytest.param({"a": np.zeros((6, 4), np.float32)}, "a", id="transposed"),
        pytest.param({"a": np.zeros((4, 6), np.float64)}, "a", id="item-size"),
        pytest.param({"b": np.zeros((5, 1), np.uint16)}, "b", id="axes"),
    ],
)
def test_tensors_that_are_not_the_layouts_are_refused(
    transport: WeightTransport, changes: dict[str, Any], field: str
) -> None:
    given_tensors = {n: t for n, t in (tensors() | changes).items() if t is not None}

    with pytest.raises(InvalidFieldError) as raised:
        transport.sender("run").send(
            transport.arena("run", 1, SOURCE.size()), SOURCE, given_tensors.items()
        )
    assert raised.value.field == field


def test_a_tensor_that_is_not_contiguous_is_sent_as_it_reads(transport: WeightTransport) -> None:
    arena = transport.arena("run", 1, SOURCE.size())
    turned = tensors() | {"a": np.asfortranarray(tensors()["a"])}

    digests = transport.sender("run").send(arena, SOURCE, turned.items())

    assert_same(received(transport, arena, digests), tensors())


@pytest.mark.parametrize("size", [2**50, 2**62])
def test_more_than_is_free_is_refused_before_anything_is_allocated(
    transport: WeightTransport, tmp_path: Path, size: int
) -> None:
    with pytest.raises(ArenaFullError) as raised:
        transport.sender("run").send(transport.arena("run", 1, size), SOURCE, tensors().items())
    assert raised.value.value == str(size)
    assert int(raised.value.limit) < size
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["/etc/{}", "{{}}/../{}", "{{}}/x/{}", "{{}}/other", ""])
def test_a_path_outside_the_directory_is_never_opened(
    transport: WeightTransport, tmp_path: Path, place: str
) -> None:
    name = Path(transport.arena("run", 1, 1).path).name
    arena = Arena(place.format(name).format(tmp_path), SOURCE.size())

    with pytest.raises(InvalidFieldError, match=r"arena\.path"):
        transport.sender("run").send(arena, SOURCE, tensors().items())
    with pytest.raises(InvalidFieldError, match=r"arena\.path"):
        received(transport, arena, {})
    with pytest.raises((InvalidFieldError, ArenaMissingError)):
        transport.alias("run", 2, arena)


def test_a_link_is_never_followed(transport: WeightTransport, tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(bytes(SOURCE.size()))
    arena = transport.arena("run", 1, SOURCE.size())
    Path(arena.path).symlink_to(tmp_path / "victim")

    with pytest.raises(OSError, match="symbolic links"):
        received(transport, arena, {})


def test_runs_do_not_touch_each_other(transport: WeightTransport) -> None:
    one, other = transport.sender("run"), transport.sender("run-1")
    kept = transport.arena("run", 1, SOURCE.size())
    digests = one.send(kept, SOURCE, tensors().items())
    for version in (1, 2, 3):
        arena = transport.arena("run-1", version, SOURCE.size())
        other.send(arena, SOURCE, tensors().items())
        other.keep(arena)

    other.close()
    transport.sender("run-1")

    assert_same(received(transport, kept, digests), tensors())


def test_bad_names_and_places_are_refused(transport: WeightTransport, tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="directory"):
        type(transport)(tmp_path / "absent")  # pyright: ignore[reportCallIssue]
    with pytest.raises(InvalidFieldError, match="run_id"):
        transport.arena("../run", 1, 1)
    with pytest.raises(InvalidFieldError, match="run_id"):
        transport.sender("*")
    with pytest.raises(InvalidFieldError, match=r"arena.size: expected >= \d+, got 8"):
        transport.sender("run").send(transport.arena("run", 1, 8), SOURCE, tensors().items())


def test_no_descriptor_stays_open(transport: WeightTransport) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    for version in range(20):
        sender = transport.sender("run")
        arena = transport.arena("run", version, SOURCE.size())
        received(transport, arena, sender.send(arena, SOURCE, tensors().items()))
        sender.close()

    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
