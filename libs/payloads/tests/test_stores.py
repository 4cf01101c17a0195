"""What every payload store promises: the port, on each of its adapters."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sidecar_process import PATIENCE_S, RUN, Sidecar, running

from treadle_core.errors import PayloadCorruptError, PayloadMissingError
from treadle_core.media import Medium
from treadle_payloads.files import FileStore
from treadle_payloads.media import fetch_media, put_medium
from treadle_payloads.sidecar_store import SidecarStore
from treadle_payloads.store import Hold, PayloadReference, PayloadStore
from treadle_runtime import plugins
from treadle_runtime.plugins import PluginConfig

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with running(tmp_path_factory.mktemp("node")) as made:
        yield made


@pytest.fixture(params=["files", "sidecar", "sidecar elsewhere"])
def store(request, tmp_path: Path, sidecar: Sidecar) -> PayloadStore:
    if request.param == "files":
        return FileStore(tmp_path)
    return sidecar.store(far=request.param != "sidecar")


def file_of(store: PayloadStore, sidecar: Sidecar, reference: PayloadReference) -> Path:
    files = store if isinstance(store, FileStore) else FileStore(sidecar.spool)
    return files.path(reference.sha256)


@pytest.fixture
def data(request) -> bytes:
    """Of this test alone: the sidecar outlives it."""
    return os.urandom(16) + request.node.name.encode() * 1000


def test_what_was_put_is_got(store: PayloadStore, data: bytes) -> None:
    reference = store.put(data, holder="e1")

    assert reference == PayloadReference.of(data)
    assert store.has(reference)
    assert store.get(reference) == data


@pytest.mark.parametrize("size", [0, 1, 2 * 1024 * 1024, 5_000_001])
def test_any_size_is_kept(store: PayloadStore, size: int) -> None:
    data = os.urandom(size)

    assert store.get(store.put(data, holder="e1")) == data


def test_many_are_fetched_at_once_and_those_that_are_not_there_say_so(
    store: PayloadStore, data: bytes
) -> None:
    contents = [data + bytes([place]) for place in range(20)]
    references = [store.put(content, holder="e1") for content in contents]
    nowhere = PayloadReference("0" * 64, 5, references[0].node)

    fetched = store.fetch([*references, nowhere], timeout_s=PATIENCE_S)

    assert [fetched[reference.sha256] for reference in references] == contents
    assert isinstance(fetched[nowhere.sha256], PayloadMissingError)


def test_the_same_bytes_of_a_group_are_stored_once(
    store: PayloadStore, sidecar: Sidecar, data: bytes
) -> None:
    references = {store.put(data, holder=f"e{member}") for member in range(16)}

    assert len(references) == 1
    (reference,) = references
    folder = file_of(store, sidecar, reference).parent
    assert [path.name for path in folder.iterdir()].count(reference.sha256) == 1
    assert list((folder.parent / "tmp").iterdir()) == []


def test_only_what_is_there_is_confirmed(store: PayloadStore, data: bytes) -> None:
    reference = store.put(data, holder="e1")
    longer = PayloadReference(reference.sha256, reference.size + 1, reference.node)
    other = PayloadReference("0" * 64, 5, reference.node)
    needed, *wrong = (Hold(each, "e1") for each in (reference, longer, other))

    assert store.confirm([wrong[0], needed, wrong[1]], writer_epoch=1) == wrong
    assert [store.has(hold.reference) for hold in (needed, *wrong)] == [True, False, False]


def test_what_is_released_is_gone(store: PayloadStore, data: bytes) -> None:
    reference = store.put(data, holder="e1")
    store.confirm([Hold(reference, "e1")], writer_epoch=1)

    for _ in range(2):
        store.release([Hold(reference, "e1")], writer_epoch=1)

    assert not store.has(reference)
    with pytest.raises(PayloadMissingError):
        store.get(reference)


@pytest.mark.parametrize("damage", ["flip", "cut", "longer", "empty"])
def test_damage_is_found_by_whoever_reads(
    store: PayloadStore, sidecar: Sidecar, data: bytes, damage: str
) -> None:
    reference = store.put(data, holder="e1")
    damaged = {
        "flip": bytes([data[0] ^ 1]) + data[1:],
        "cut": data[:-1],
        "longer": data + b"\0",
        "empty": b"",
    }[damage]
    file_of(store, sidecar, reference).write_bytes(damaged)

    with pytest.raises(PayloadCorruptError):
        store.get(reference)
    found = store.fetch([reference], timeout_s=PATIENCE_S)[reference.sha256]
    assert isinstance(found, PayloadCorruptError)


def test_both_are_plugins_of_a_recipe(tmp_path: Path) -> None:
    built = {
        name: plugins.build(
            "treadle.payload_stores", PluginConfig(name=name), run_dir=tmp_path, run_id=RUN
        )
        for name in ("files", "sidecar")
    }

    assert isinstance(built["files"], FileStore)
    assert isinstance(built["sidecar"], SidecarStore)
    reference = built["files"].put(b"tokens")
    assert (tmp_path / "payloads" / reference.sha256[:2] / reference.sha256).is_file()


def test_the_command_is_installed() -> None:
    answer = subprocess.run(
        [Path(sys.executable).with_name("treadle-payloads"), "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )

    assert "payloads" in answer.stdout


def test_what_others_need_stays_when_a_hold_ends(store: PayloadStore, data: bytes) -> None:
    reference = store.put(data, holder="e1")
    store.put(data, holder="e2")
    store.confirm([Hold(reference, "e1"), Hold(reference, "e2")], writer_epoch=1)

    store.release([Hold(reference, "e1", shared=True)], writer_epoch=1)
    assert store.has(reference)
    store.release([Hold(reference, "e2")], writer_epoch=1)
    assert not store.has(reference)


def test_media_are_fetched_from_wherever_they_lie(store: PayloadStore, data: bytes) -> None:
    medium = put_medium(Medium.of(data, "image/png"), data, store, holder="e1")

    found = fetch_media([medium], store, timeout_s=PATIENCE_S)

    assert found[medium.sha256] == data
