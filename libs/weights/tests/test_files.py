import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError
from treadle_weights import safetensors
from treadle_weights.files import Files, Sender
from treadle_weights.layouts import Layout, Rectangle, whole
from treadle_weights.plan import plan
from treadle_weights.transport import Arena, ArenaCorruptError, ArenaFullError, LoadOrder

LAYOUT = whole({"b": ("bfloat16", (3,)), "a": ("float32", (2, 2)), "c": ("bool", (1,))})
TENSORS = {
    "b": np.array([1, 2, 3], np.uint16),
    "a": np.arange(4, dtype=np.float32).reshape(2, 2),
    "c": np.array([1], np.uint8),
}


def send(transport: Files, sender: Sender, version: int, *, keep: bool = True) -> Arena:
    arena = transport.arena("run", version, LAYOUT.size())
    sender.send(arena, LAYOUT, TENSORS.items())
    if keep:
        sender.keep(arena)
    return arena


def versions(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.safetensors"))


def test_a_file_is_what_the_safetensors_package_reads(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    transport = Files(tmp_path)
    layout = whole({"a": ("float32", (2, 2)), "c": ("uint8", (1,))})
    arena = transport.arena("run", 1, layout.size())
    transport.sender("run").send(arena, layout, [("c", TENSORS["c"]), ("a", TENSORS["a"])])

    read = package.load_file(arena.path)

    np.testing.assert_array_equal(read["a"], TENSORS["a"])
    np.testing.assert_array_equal(read["c"], TENSORS["c"])
    package.save_file({"x": np.zeros((3, 1), np.float64)}, tmp_path / "other")
    header = safetensors.decode(np.fromfile(tmp_path / "other", np.uint8))
    assert header.layout == whole({"x": ("float64", (3, 1))})


def test_a_version_outlives_its_sender_and_is_found_with_its_digests(tmp_path: Path) -> None:
    sender = Files(tmp_path).sender("run")
    arena = Files(tmp_path).arena("run", 3, LAYOUT.size())
    digests = sender.send(arena, LAYOUT, TENSORS.items())
    sender.keep(arena)
    sender.close()

    stored = Files(tmp_path).find("run", 3)

    assert stored is not None
    assert stored.digests == digests
    buffer = np.zeros(LAYOUT.size(), np.uint8)
    order = LoadOrder(3, stored.arena, stored.layout, plan(stored.layout, LAYOUT), stored.digests)
    Files(tmp_path).receiver().receive(order, LAYOUT, buffer)
    assert buffer[:6].view(np.uint16).tolist() == [1, 2, 3]
    assert Files(tmp_path).find("run", 4) is None
    assert Files(tmp_path).find("other", 3) is None


def test_the_newest_two_committed_stay_and_what_was_aborted_goes(tmp_path: Path) -> None:
    transport = Files(tmp_path)
    sender = transport.sender("run")
    for version in (1, 2):
        send(transport, sender, version)
    send(transport, sender, 3, keep=False)
    assert versions(tmp_path) == [f"run.{v}.safetensors" for v in (1, 2, 3)]

    # The next trainer never heard of 3.
    successor = transport.sender("run")
    send(transport, successor, 4)
    assert versions(tmp_path) == ["run.2.safetensors", "run.4.safetensors"]
    send(transport, successor, 5)
    assert versions(tmp_path) == ["run.4.safetensors", "run.5.safetensors"]
    assert len(list(tmp_path.glob("*.committed"))) == 2


def test_what_a_stopped_trainer_does_late_hurts_no_newer_version(tmp_path: Path) -> None:
    transport = Files(tmp_path)
    stopped, successor = transport.sender("run"), transport.sender("run")
    old = send(transport, stopped, 1)
    aborted = send(transport, stopped, 2, keep=False)
    send(transport, successor, 3)
    send(transport, successor, 4, keep=False)

    stopped.keep(old)
    stopped.discard(aborted)
    stopped.discard(old)

    assert versions(tmp_path) == [f"run.{v}.safetensors" for v in (1, 3, 4)]


def test_what_was_not_finished_is_no_version_and_goes_with_the_next_sender(tmp_path: Path) -> None:
    transport = Files(tmp_path)
    part = tmp_path / ".run.1.safetensors.0.part"
    part.write_bytes(b"half")
    assert transport.find("run", 1) is None

    transport.sender("other")
    assert part.exists()
    transport.sender("run")
    assert not part.exists()


def test_a_send_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    transport = Files(tmp_path)
    sender = transport.sender("run")
    arena = send(transport, sender, 1)
    before = Path(arena.path).read_bytes()

    with pytest.raises(InvalidFieldError):
        sender.send(arena, LAYOUT, [("b", np.zeros(3, np.uint16))])

    assert Path(arena.path).read_bytes() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("name", "nth", "number"),
    [
        pytest.param("fsync", 1, errno.ENOSPC, id="file"),
        pytest.param("replace", 1, errno.EDQUOT, id="name"),
        pytest.param("fsync", 2, errno.EFBIG, id="directory"),
        pytest.param("fsync", 3, errno.ENOSPC, id="kept"),
    ],
)
def test_a_disk_that_is_full_only_at_an_fsync_or_a_rename_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, number: int
) -> None:
    transport = Files(tmp_path)
    sender, real, calls = transport.sender("run"), getattr(os, name), []

    def full(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == nth:
            raise OSError(number, "No room")
        real(*arguments)

    monkeypatch.setattr(os, name, full)

    with pytest.raises(ArenaFullError, match="No room"):
        send(transport, sender, 1)
    send(transport, sender, 1)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "run.1.safetensors",
        "run.1.safetensors.committed",
    ]


def test_the_default_place_is_in_the_runs_directory(tmp_path: Path) -> None:
    arena = Files(run_dir=tmp_path).arena("run", 1, 8)
    assert Path(arena.path).parent == (tmp_path / "versions").resolve()
    with pytest.raises(InvalidFieldError, match="directory"):
        Files()


def test_a_file_of_other_tensors_is_refused_by_name(tmp_path: Path) -> None:
    transport = Files(tmp_path)
    arena = send(transport, transport.sender("run"), 1)
    other = whole({"b": ("bfloat16", (3,)), "a": ("float32", (4,)), "c": ("bool", (1,))})

    order = LoadOrder(1, arena, other, plan(other, other), {})
    with pytest.raises(ArenaCorruptError, match="a is float32 \\[2, 2\\], not float32 \\[4\\]"):
        transport.receiver().receive(order, other, np.zeros(other.size(), np.uint8))


@pytest.mark.parametrize("stated", ["", "[]", '{"a": "00"}', '{"d": "0123456789abcdef"}'])
def test_a_file_without_the_digest_of_each_tensor_is_not_found(tmp_path: Path, stated: str) -> None:
    layout = whole({"a": ("uint8", (1,))})
    header = safetensors.encode(layout, {"treadle.digests": stated})
    (tmp_path / "run.1.safetensors").write_bytes(header + b"x")

    with pytest.raises(ArenaCorruptError):
        Files(tmp_path).find("run", 1)


def file_of(entries: Any, data: bytes = b"", *, length: int | None = None) -> np.ndarray[Any, Any]:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    size = len(text) if length is None else length
    return np.frombuffer(struct.pack("<Q", size) + text + data, np.uint8)


def entry(dtype: Any = "U8", shape: Any = (1,), offsets: Any = (0, 1)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("file", "field"),
    [
        pytest.param(np.zeros(0, np.uint8), "size", id="empty"),
        pytest.param(file_of({}, length=2**63), "header", id="header-beyond-the-file"),
        pytest.param(file_of({}, length=0), "header", id="no-header"),
        pytest.param(file_of(b"[1]"), "header", id="no-object"),
        pytest.param(file_of(b'{"a":'), "header", id="no-json"),
        pytest.param(file_of(b"\xff\xff"), "header", id="no-utf-8"),
        pytest.param(file_of(b'{"a":1,"a":2}'), "header", id="twice"),
        pytest.param(file_of(b"[" * 100_000), "header", id="deep"),
        pytest.param(file_of({"__metadata__": {"x": 1}}), "__metadata__", id="metadata"),
        pytest.param(file_of({"a": 1}, b"x"), "a", id="no-entry"),
        pytest.param(file_of({"a": entry("Q8")}, b"x"), "a", id="dtype"),
        pytest.param(file_of({"a": entry(shape=[1.0])}, b"x"), "a", id="shape"),
        pytest.param(file_of({"a": entry(shape=[-1])}, b"x"), "a", id="negative"),
        pytest.param(file_of({"a": entry(shape=[2**62, 8])}, b"x"), "a", id="overflow"),
        pytest.param(file_of({"a": entry(offsets=[0, 2])}, b"xx"), "a", id="longer"),
        pytest.param(file_of({"a": entry(offsets=[1, 2])}, b"xx"), "a", id="gap"),
        pytest.param(file_of({"a": entry(), "b": entry()}, b"x"), "b", id="overlap"),
        pytest.param(file_of({"a": entry()}, b"xx"), "size", id="more-data"),
        pytest.param(file_of({"a": entry()}), "size", id="less-data"),
        pytest.param(
            file_of({"a": entry(), "b": entry("F32", [1], [1, 5])}, b"x" * 5), "b", id="aligned"
        ),
    ],
)
def test_what_is_no_safetensors_file_is_refused_by_field(file: Any, field: str) -> None:
    with pytest.raises(safetensors.SafetensorsError) as raised:
        safetensors.decode(file)
    assert raised.value.field == field


@given(st.data())
def test_any_damage_to_a_header_is_refused_or_harmless(data: st.DataObject) -> None:
    layout = safetensors.compact(LAYOUT)
    whole_file = bytearray(safetensors.encode(layout, {"k": "v"}) + bytes(layout.size()))
    at = data.draw(st.integers(0, len(whole_file) - 1))
    whole_file[at] ^= 1 << data.draw(st.integers(0, 7))
    cut = data.draw(st.integers(0, len(whole_file)))
    for damaged in (bytes(whole_file), bytes(whole_file[:cut])):
        try:
            header = safetensors.decode(np.frombuffer(damaged, np.uint8))
        except safetensors.SafetensorsError:
            continue
        assert header.size == len(damaged)


def test_tensors_lie_end_to_end_at_multiples_of_their_item_size() -> None:
    layout = safetensors.compact(LAYOUT)
    assert [(r.tensor, r.offset, r.end) for r in layout.rectangles] == [
        ("a", 0, 16),
        ("b", 16, 22),
        ("c", 22, 23),
    ]
    with pytest.raises(InvalidFieldError, match="__metadata__"):
        safetensors.compact(Layout((Rectangle("__metadata__", "bool", (), (), (), 0),)))
