import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError
from treadle_weights.layouts import Layout, Rectangle, whole
from treadle_weights.plan import box_of, plan
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.transport import (
    Arena,
    ArenaCorruptError,
    ArenaFullError,
    ArenaHeldError,
    ArenaMissingError,
    LoadOrder,
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


def tensors(seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.random((4, 6), np.float32),
        "b": rng.integers(0, 2**16, 5, np.uint16),
        "c": rng.random((), np.float32),
    }


def order_of(arena: Arena, digests: dict[str, int], version: int = 1) -> LoadOrder:
    return LoadOrder(version, arena, SOURCE, plan(SOURCE, TARGET), digests)


def arenas(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_version_arrives_bit_for_bit_in_another_layout(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    arena = transport.arena("run", 1, SOURCE.size())
    digests = transport.sender("run").send(arena, SOURCE, tensors().items())
    buffer = np.zeros(TARGET.size(), np.uint8)

    transport.receiver().receive(order_of(arena, digests), TARGET, buffer)

    sent = tensors()
    np.testing.assert_array_equal(box_of(buffer, TARGET.rectangles[0]), sent["b"])
    right = box_of(buffer, TARGET.rectangles[1]).view(np.float32)
    left = box_of(buffer, TARGET.rectangles[2]).view(np.float32)
    np.testing.assert_array_equal(np.hstack((left, right)), sent["a"])
    assert box_of(buffer, TARGET.rectangles[3]).view(np.float32)[()] == sent["c"]


def test_sending_again_overwrites_the_same_arena(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    arena, sender = transport.arena("run", 1, SOURCE.size()), transport.sender("run")
    sender.send(arena, SOURCE, tensors(1).items())

    digests = sender.send(arena, SOURCE, tensors(2).items())

    transport.receiver().receive(order_of(arena, digests), TARGET, np.zeros(112, np.uint8))
    assert arenas(tmp_path) == ["treadle.run.1"]


def test_a_sender_keeps_what_is_committed_and_releases_the_rest(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    sender = transport.sender("run")
    first, second, third = (transport.arena("run", version, 112 * 2) for version in (1, 2, 3))
    for arena in (first, second, third):
        sender.send(arena, SOURCE, tensors().items())

    sender.discard(second)
    sender.discard(second)
    sender.keep(third)
    assert arenas(tmp_path) == ["treadle.run.3"]

    sender.close()
    assert arenas(tmp_path) == []


def test_a_receiver_that_mapped_an_arena_reads_on_after_its_release(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    sender, receiver = transport.sender("run"), transport.receiver()
    arena = transport.arena("run", 1, SOURCE.size())
    sender.send(arena, SOURCE, tensors().items())
    mapped = receiver._bytes_of(arena)
    before = mapped.copy()

    sender.close()

    np.testing.assert_array_equal(mapped, before)
    with pytest.raises(ArenaMissingError):
        receiver.receive(order_of(arena, {}), TARGET, np.zeros(112, np.uint8))


@settings(max_examples=40)
@given(st.data())
def test_a_flipped_bit_names_its_tensor(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("arenas")
    transport = SharedMemory(directory)
    sender = transport.sender("run")
    arena = transport.arena("run", 1, SOURCE.size())
    digests = sender.send(arena, SOURCE, tensors().items())
    damaged = data.draw(st.sampled_from(SOURCE.rectangles))
    at = data.draw(st.integers(damaged.offset, damaged.end - 1))
    content = bytearray(Path(arena.path).read_bytes())
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    Path(arena.path).write_bytes(content)

    with pytest.raises(ArenaCorruptError) as raised:
        transport.receiver().receive(order_of(arena, digests), TARGET, np.zeros(112, np.uint8))
    assert raised.value.field == damaged.tensor
    sender.close()


def test_a_plan_that_misses_a_tensor_is_found_by_what_arrived(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    arena = transport.arena("run", 1, SOURCE.size())
    digests = transport.sender("run").send(arena, SOURCE, tensors().items())
    copies = tuple(copy for copy in plan(SOURCE, TARGET) if copy.tensor != "b")
    order = LoadOrder(1, arena, SOURCE, copies, digests)

    with pytest.raises(ArenaCorruptError, match="b has another digest"):
        transport.receiver().receive(order, TARGET, np.zeros(112, np.uint8))


def test_a_tensor_without_an_expected_digest_is_not_trusted(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    arena = transport.arena("run", 1, SOURCE.size())
    digests = transport.sender("run").send(arena, SOURCE, tensors().items())
    del digests["c"]

    with pytest.raises(ArenaCorruptError, match="c has another digest"):
        transport.receiver().receive(order_of(arena, digests), TARGET, np.zeros(112, np.uint8))


@pytest.mark.parametrize("size", [0, 100, 4096])
def test_an_arena_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    transport = SharedMemory(tmp_path)
    arena = transport.arena("run", 1, SOURCE.size())
    (tmp_path / "treadle.run.1").write_bytes(bytes(size))

    with pytest.raises(ArenaCorruptError, match=f"got {size}"):
        transport.receiver().receive(order_of(arena, {}), TARGET, np.zeros(112, np.uint8))


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
    tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    transport = SharedMemory(tmp_path)
    given_tensors = {n: t for n, t in (tensors() | changes).items() if t is not None}

    with pytest.raises(InvalidFieldError) as raised:
        transport.sender("run").send(
            transport.arena("run", 1, SOURCE.size()), SOURCE, given_tensors.items()
        )
    assert raised.value.field == field


def test_a_tensor_that_is_not_contiguous_is_sent_as_it_reads(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    layout = whole({"a": ("float32", (6, 4))})
    arena = transport.arena("run", 1, layout.size())
    tensor = tensors()["a"].T

    transport.sender("run").send(arena, layout, [("a", tensor)])

    arrived = np.frombuffer(Path(arena.path).read_bytes(), np.float32).reshape(6, 4)
    np.testing.assert_array_equal(arrived, tensor)


@pytest.mark.parametrize("size", [2**50, 2**62])
def test_more_than_is_free_is_refused_before_anything_is_allocated(
    tmp_path: Path, size: int
) -> None:
    transport = SharedMemory(tmp_path)

    with pytest.raises(ArenaFullError) as raised:
        transport.sender("run").send(transport.arena("run", 1, size), SOURCE, tensors().items())
    assert raised.value.value == str(size)
    assert int(raised.value.limit) < size
    assert arenas(tmp_path) == []


@pytest.mark.parametrize(
    "path", ["/etc/treadle.run.1", "{}/../treadle.run.1", "{}/other", "{}/x/treadle.run.1", ""]
)
def test_a_path_outside_the_directory_is_never_opened(tmp_path: Path, path: str) -> None:
    transport = SharedMemory(tmp_path)
    arena = Arena(path.format(tmp_path), SOURCE.size())

    with pytest.raises(InvalidFieldError, match=r"arena\.path"):
        transport.sender("run").send(arena, SOURCE, tensors().items())
    with pytest.raises(InvalidFieldError, match=r"arena\.path"):
        transport.receiver().receive(order_of(arena, {}), TARGET, np.zeros(112, np.uint8))


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    (tmp_path / "victim").write_bytes(bytes(SOURCE.size()))
    (tmp_path / "treadle.run.1").symlink_to(tmp_path / "victim")
    arena = transport.arena("run", 1, SOURCE.size())

    with pytest.raises(OSError, match="symbolic links"):
        transport.receiver().receive(order_of(arena, {}), TARGET, np.zeros(112, np.uint8))


def test_runs_do_not_touch_each_other(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    one = transport.sender("run")
    one.send(transport.arena("run", 1, SOURCE.size()), SOURCE, tensors().items())
    other = transport.sender("run-1")
    other.send(transport.arena("run-1", 1, SOURCE.size()), SOURCE, tensors().items())

    other.close()

    assert arenas(tmp_path) == ["treadle.run.1"]


def test_an_arena_of_a_living_sender_is_not_taken(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    arena = transport.arena("run", 1, SOURCE.size())
    first = transport.sender("run")
    digests = first.send(arena, SOURCE, tensors(1).items())

    second = transport.sender("run")
    with pytest.raises(ArenaHeldError):
        second.send(arena, SOURCE, tensors(2).items())

    second.close()
    transport.receiver().receive(order_of(arena, digests), TARGET, np.zeros(112, np.uint8))


SEND_AND_WAIT = """
import sys
import numpy as np
from treadle_weights.layouts import whole
from treadle_weights.shared_memory import SharedMemory
layout = whole({"a": ("float32", (1000,))})
transport = SharedMemory(sys.argv[1])
sender = transport.sender("run")
for version in (1, 2):
    arena = transport.arena("run", version, layout.size())
    digests = sender.send(arena, layout, [("a", np.arange(1000, dtype=np.float32))])
print(digests["a"], flush=True)
sys.stdin.read()
"""


def test_what_a_killed_sender_left_can_be_read_until_its_successor_comes(tmp_path: Path) -> None:
    transport, layout = SharedMemory(tmp_path), whole({"a": ("float32", (1000,))})
    command = [sys.executable, "-c", SEND_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        digest = int(process.stdout.readline())
        transport.sender("run")
        assert arenas(tmp_path) == ["treadle.run.1", "treadle.run.2"]
        process.kill()

    buffer = np.zeros(layout.size(), np.uint8)
    arena = transport.arena("run", 2, layout.size())
    order = LoadOrder(2, arena, layout, plan(layout, layout), {"a": digest})
    transport.receiver().receive(order, layout, buffer)
    np.testing.assert_array_equal(buffer.view(np.float32), np.arange(1000, dtype=np.float32))

    transport.sender("run")
    assert arenas(tmp_path) == []


def test_only_long_dead_senders_of_other_runs_are_cleaned_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = SharedMemory(tmp_path)
    alive = transport.sender("alive")
    alive.send(transport.arena("alive", 1, SOURCE.size()), SOURCE, tensors().items())
    (tmp_path / "treadle.dead.1").write_bytes(b"left")
    (tmp_path / "other").write_bytes(b"not ours")

    transport.sender("run")
    assert arenas(tmp_path) == ["other", "treadle.alive.1", "treadle.dead.1"]

    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 700)
    transport.sender("run")
    assert arenas(tmp_path) == ["other", "treadle.alive.1"]


def test_a_link_in_the_way_of_an_arena_is_neither_followed_nor_fatal(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    (tmp_path / "victim").write_bytes(b"x")
    (tmp_path / "treadle.run.1").symlink_to(tmp_path / "victim")
    sender = transport.sender("run")

    with pytest.raises(ArenaHeldError):
        sender.send(transport.arena("run", 1, SOURCE.size()), SOURCE, tensors().items())
    assert (tmp_path / "victim").read_bytes() == b"x"


def test_bad_names_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="directory"):
        SharedMemory(tmp_path / "absent")
    with pytest.raises(InvalidFieldError, match="run_id"):
        SharedMemory(tmp_path).arena("../run", 1, 1)
    with pytest.raises(InvalidFieldError, match="run_id"):
        SharedMemory(tmp_path).sender("*")
    with pytest.raises(InvalidFieldError, match=r"arena.size: expected >= \d+, got 8"):
        SharedMemory(tmp_path).sender("run").send(
            SharedMemory(tmp_path).arena("run", 1, 8), SOURCE, tensors().items()
        )


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    transport = SharedMemory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    for version in range(20):
        sender = transport.sender("run")
        arena = transport.arena("run", version, SOURCE.size())
        digests = sender.send(arena, SOURCE, tensors().items())
        transport.receiver().receive(
            order_of(arena, digests), TARGET, np.zeros(TARGET.size(), np.uint8)
        )
        sender.close()

    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
