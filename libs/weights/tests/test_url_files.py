"""The transport `files` under a URL: real fsspec file systems, one in memory and one on a disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fsspec")

import fsspec

from treadle_core.errors import InvalidFieldError
from treadle_weights import url_files
from treadle_weights.file_transport import FileTransport
from treadle_weights.files import Files
from treadle_weights.layouts import whole
from treadle_weights.plan import box_of, plan
from treadle_weights.transport import (
    Arena,
    ArenaCorruptError,
    ArenaFullError,
    ArenaMissingError,
    LoadOrder,
    Receipt,
)

SOURCE = whole({"b": ("bfloat16", (30,)), "a": ("float32", (40, 60)), "c": ("float32", ())})
TARGET = whole({"a": ("float32", (40, 60)), "c": ("float32", ()), "b": ("bfloat16", (30,))})


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/versions"
    else:
        yield "memory://bucket/versions"
        fsspec.filesystem("memory").store.clear()


def tensors(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return {
        "a": rng.random((40, 60), np.float32),
        "b": rng.integers(0, 2**16, 30, np.uint16),
        "c": np.array(seed, np.float32),
    }


def send(transport: FileTransport, sender: Any, version: int, *, keep: bool = True) -> LoadOrder:
    arena = transport.arena("run", version, SOURCE.size())
    digests = sender.send(arena, SOURCE, tensors(version).items())
    if keep:
        sender.keep(arena)
    return LoadOrder(version, arena, SOURCE, plan(SOURCE, TARGET), digests)


def load(transport: FileTransport, order: LoadOrder, seed: int) -> Receipt:
    buffer = np.zeros(TARGET.size(), np.uint8)
    receipt = transport.receiver().receive(order, TARGET, buffer)
    for rectangle in TARGET.rectangles:
        found, expected = box_of(buffer, rectangle), tensors(seed)[rectangle.tensor]
        np.testing.assert_array_equal(found, expected.view(found.dtype))
    return receipt


def names(url: str) -> set[str]:
    system, root = fsspec.url_to_fs(url)
    return {name.rpartition("/")[2] for name in system.ls(root, detail=False)}


def test_a_version_arrives_bit_for_bit_by_ranges(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_files, "RANGE_BYTES", 1024)
    monkeypatch.setattr(url_files, "_GUESS", 16)
    transport = FileTransport(url=url)

    receipt = load(transport, send(transport, transport.sender("run"), 1), 1)

    assert receipt.launches == -(-(40 * 60 * 4 + 4 + 60) // 1024)
    assert names(url) == {"run.1.safetensors", "run.1.safetensors.committed"}


def test_a_version_outlives_its_sender_and_is_found_with_its_digests(url: str) -> None:
    transport = FileTransport(url=url)
    order = send(transport, transport.sender("run"), 3)

    stored = FileTransport(url=url).find("run", 3)

    assert stored is not None
    assert stored.digests == order.digests
    copies = plan(stored.layout, TARGET)
    load(transport, LoadOrder(3, stored.arena, stored.layout, copies, stored.digests), 3)
    assert transport.find("run", 4) is None
    assert transport.find("other", 3) is None


def test_it_is_the_same_file_as_in_a_directory(tmp_path: Path) -> None:
    by_url = FileTransport(url=f"file://{tmp_path}")
    order = send(by_url, by_url.sender("run"), 1)

    stored = Files(tmp_path).find("run", 1)

    assert stored is not None
    assert stored.digests == order.digests


def test_the_newest_two_committed_stay_and_what_was_aborted_goes(url: str) -> None:
    transport = FileTransport(url=url)
    sender = transport.sender("run")
    orders = {version: send(transport, sender, version) for version in (1, 2)}
    orders[3] = send(transport, sender, 3, keep=False)
    orders[4] = send(transport, sender, 4)
    aborted = send(transport, sender, 5, keep=False)
    sender.discard(aborted.arena)
    sender.discard(orders[4].arena)  # committed: stays

    for version in (2, 4):
        load(transport, orders[version], version)
    for order in (orders[1], orders[3], aborted):
        with pytest.raises(ArenaMissingError):
            load(transport, order, order.version)


def test_an_alias_names_its_base_which_stays_as_long(url: str) -> None:
    transport = FileTransport(url=url)
    sender = transport.sender("run")
    base = send(transport, sender, 1)

    second = transport.alias("run", 2, base.arena)
    third = transport.alias("run", 3, second)
    for arena in (second, third):
        sender.keep(arena)

    found = transport.find("run", 3)
    assert found is not None
    assert found.digests == base.digests
    load(transport, LoadOrder(3, third, SOURCE, base.copies, base.digests), 1)
    send(transport, sender, 4)
    send(transport, sender, 5)
    assert not any(name.startswith("run.1.") for name in names(url))
    with pytest.raises(ArenaMissingError):
        transport.alias("run", 6, base.arena)


def test_a_send_that_fails_leaves_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = FileTransport(url=url)
    sender = transport.sender("run")
    arena = transport.arena("run", 1, SOURCE.size())
    with pytest.raises(InvalidFieldError):
        sender.send(arena, SOURCE, [("a", tensors(1)["a"])])

    def broken(*_: object) -> None:
        raise OSError("the store is away")

    # After the header was written.
    monkeypatch.setattr(url_files, "packed", broken)
    with pytest.raises(OSError, match="away"):
        sender.send(arena, SOURCE, tensors(1).items())

    assert names(url) == set()


@pytest.mark.parametrize("at", [0, 3, 20, -1, -9_000])
def test_a_flipped_bit_is_found(url: str, at: int) -> None:
    transport = FileTransport(url=url)
    order = send(transport, transport.sender("run"), 1)
    system, path = fsspec.url_to_fs(order.arena.path)
    content = bytearray(system.cat_file(path))
    content[at] ^= 1
    system.pipe_file(path, bytes(content))

    with pytest.raises(ArenaCorruptError):
        load(transport, order, 1)


@pytest.mark.parametrize("size", [0, 7, 100, 9_000])
def test_a_file_cut_short_is_no_version(url: str, size: int) -> None:
    transport = FileTransport(url=url)
    order = send(transport, transport.sender("run"), 1)
    system, path = fsspec.url_to_fs(order.arena.path)
    system.pipe_file(path, system.cat_file(path)[:size])

    with pytest.raises(ArenaCorruptError):
        load(transport, order, 1)
    with pytest.raises(ArenaCorruptError):
        transport.find("run", 1)


@pytest.mark.parametrize(
    "path",
    ["", "/etc/passwd", "memory://other/run.1.safetensors", "{}/../run.1.safetensors", "{}/x"],
)
def test_a_path_elsewhere_is_never_opened(url: str, path: str) -> None:
    transport = FileTransport(url=url)
    sender = transport.sender("run")
    order = send(transport, sender, 1)
    arena = Arena(path.format(url), SOURCE.size())

    with pytest.raises(InvalidFieldError, match=r"arena\.path"):
        sender.send(arena, SOURCE, tensors(1).items())
    with pytest.raises(InvalidFieldError, match=r"arena\.path"):
        load(transport, LoadOrder(1, arena, SOURCE, order.copies, order.digests), 1)
    with pytest.raises(InvalidFieldError, match=r"arena\.path"):
        transport.alias("run", 2, arena)


def test_an_alias_leads_nowhere_else(url: str) -> None:
    transport = FileTransport(url=url)
    order = send(transport, transport.sender("run"), 1)
    system, path = fsspec.url_to_fs(order.arena.path)
    system.pipe_file(path + ".alias", b"../../etc/passwd")

    with pytest.raises(InvalidFieldError, match=r"arena\.path"):
        load(transport, order, 1)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    for url in ("nothing://x", "no-url", "s4://bucket/x"):
        with pytest.raises(InvalidFieldError, match="url"):
            FileTransport(url=url)
    with pytest.raises(InvalidFieldError, match="none beside a directory"):
        FileTransport(tmp_path, "memory://x")
    with pytest.raises(InvalidFieldError, match="directory"):
        FileTransport()
    with pytest.raises(InvalidFieldError, match="run_id"):
        FileTransport(url="memory://x").arena("../run", 1, 1)
    transport = FileTransport(run_dir=tmp_path)
    assert transport.arena("run", 1, 1).path == f"{tmp_path}/versions/run.1.safetensors"


def test_no_memory_is_no_room(url: str) -> None:
    huge = whole({"a": ("float32", (2**47,))})
    transport = FileTransport(url=url)
    with pytest.raises(ArenaFullError):
        transport.sender("run").send(transport.arena("run", 1, huge.size()), huge, [])
