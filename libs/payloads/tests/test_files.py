import errno
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError, PayloadCorruptError, PayloadMissingError
from treadle_payloads.files import FileStore
from treadle_payloads.store import PayloadReference, PayloadStoreFullError


def file_of(directory: Path, reference: PayloadReference) -> Path:
    return directory / reference.sha256[:2] / reference.sha256


def unfinished(directory: Path) -> list[Path]:
    return list((directory / "tmp").iterdir())


def test_what_was_put_is_got(tmp_path: Path) -> None:
    store = FileStore(tmp_path)

    reference = store.put(b"tokens")

    assert reference == PayloadReference(hashlib.sha256(b"tokens").hexdigest(), 6)
    assert store.has(reference)
    assert FileStore(tmp_path).get(reference) == b"tokens"


def test_putting_twice_keeps_one_file(tmp_path: Path) -> None:
    store = FileStore(tmp_path)

    first = store.put(b"tokens")
    before = file_of(tmp_path, first).stat()
    second = store.put(b"tokens")

    assert first == second
    assert file_of(tmp_path, first).stat().st_ino == before.st_ino
    assert unfinished(tmp_path) == []


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


@pytest.fixture(scope="module")
def store(directory: Path) -> FileStore:
    return FileStore(directory)


@given(st.data())
def test_every_kind_of_damage_is_found_and_healed_by_the_next_put(
    directory: Path, store: FileStore, data: st.DataObject
) -> None:
    content = data.draw(st.binary(min_size=1, max_size=200))
    reference = store.put(content)
    at = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes([content[at] ^ (1 << data.draw(st.integers(0, 7)))])
    damaged = data.draw(
        st.sampled_from([content[:at], content + b"\0", content[:at] + flipped + content[at + 1 :]])
    )
    file_of(directory, reference).write_bytes(damaged)

    with pytest.raises(PayloadCorruptError) as raised:
        store.get(reference)
    assert raised.value.limit != raised.value.value

    store.put(content)
    assert store.get(reference) == content


def test_a_deleted_payload_is_missing(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    reference = store.put(b"tokens")

    store.delete(reference.sha256)
    store.delete(reference.sha256)

    assert not store.has(reference)
    with pytest.raises(PayloadMissingError):
        store.get(reference)


@pytest.mark.parametrize("sha256", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_key_that_is_no_sha256_never_reaches_the_file_system(tmp_path: Path, sha256: str) -> None:
    with pytest.raises(InvalidFieldError):
        PayloadReference(sha256, 1)
    with pytest.raises(InvalidFieldError):
        FileStore(tmp_path).delete(sha256)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="size"):
        PayloadReference("0" * 64, -1)


WRITE_ALL = """
import sys
from treadle_payloads.files import FileStore
store = FileStore(sys.argv[1])
for index in map(int, sys.argv[2]):
    store.put(bytes([index]) * 70_000)
"""


def test_many_writers_of_the_same_payloads_leave_each_once_and_whole(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE_ALL, str(tmp_path), order])
        for order in ("012345", "345012")
    ]

    assert [writer.wait(60) for writer in writers] == [0, 0]

    store = FileStore(tmp_path)
    contents = [bytes([index]) * 70_000 for index in range(6)]
    assert [store.get(PayloadReference.of(content)) for content in contents] == contents
    assert unfinished(tmp_path) == []


def test_a_file_reaches_the_disk_before_its_name_and_its_name_before_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(tmp_path)
    fsync, events = os.fsync, []
    target = file_of(tmp_path, PayloadReference.of(b"tokens"))

    def recording(descriptor: int) -> None:
        kind = Path(f"/proc/self/fd/{descriptor}").resolve()
        events.append((kind.parent.name, target.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recording)
    store.put(b"tokens")

    assert events == [("tmp", False), (tmp_path.name, True)]


@pytest.mark.parametrize(
    ("name", "nth"), [("fsync", 1), ("replace", 1), ("fsync", 2)], ids=["file", "name", "directory"]
)
def test_a_disk_that_is_full_only_at_an_fsync_or_a_rename_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    store = FileStore(tmp_path)
    real, calls = getattr(os, name), []

    def full(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*arguments)

    monkeypatch.setattr(os, name, full)

    with pytest.raises(PayloadStoreFullError, match="No space left"):
        store.put(b"tokens")
    assert store.get(store.put(b"tokens")) == b"tokens"
    assert unfinished(tmp_path) == []


PUT_BEYOND_THE_LIMIT = """
import resource, signal, sys
from treadle_payloads.files import FileStore
from treadle_payloads.store import PayloadStoreFullError
store = FileStore(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    store.put(b"x" * 8192)
except PayloadStoreFullError as error:
    print(error.reason, error.value)
"""


def test_a_full_store_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PUT_BEYOND_THE_LIMIT, str(tmp_path)]

    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    assert answer.stdout.split() == ["PAYLOAD_STORE_FULL", "8192"]
    assert not FileStore(tmp_path).has(PayloadReference.of(b"x" * 8192))
    assert unfinished(tmp_path) == []


def test_an_error_that_is_not_about_room_is_not_called_one(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    (tmp_path / "tmp").rmdir()

    with pytest.raises(OSError) as raised:  # noqa: PT011
        store.put(b"tokens")
    assert raised.value.errno == errno.ENOENT


def test_only_what_lost_its_writer_is_dropped_at_the_start(tmp_path: Path) -> None:
    FileStore(tmp_path)
    old, young = tmp_path / "tmp" / "old", tmp_path / "tmp" / "young"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)

    FileStore(tmp_path)

    assert unfinished(tmp_path) == [young]
