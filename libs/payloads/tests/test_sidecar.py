"""A sidecar that is killed, stopped, filled, lied to and left alone."""

import contextlib
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sidecar_process import PATIENCE_S, RUN, Sidecar, running

from treadle_core.errors import (
    InvalidFieldError,
    PayloadCorruptError,
    PayloadMissingError,
    TreadleError,
    WrongRunError,
)
from treadle_payloads import sidecar_store, upload_wire
from treadle_payloads.files import FileStore
from treadle_payloads.store import (
    Hold,
    PayloadReference,
    PayloadStoreAwayError,
    PayloadStoreFullError,
)
from treadle_payloads.upload_wire import BrokenUploadError, Header

pytestmark = pytest.mark.processes

MB = 1 << 20
Begun = Callable[[Sidecar, bytes], socket.socket]


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    with running(tmp_path) as made:
        yield made


def header_of(data: bytes, **changed: object) -> Header:
    reference = PayloadReference.of(data)
    values = {"run_id": RUN, "sha256": reference.sha256, "size": reference.size, "holder": "e1"}
    return Header(**values | changed)


@pytest.fixture
def begun() -> Iterator[Begun]:
    """Connects to a sidecar, and says what it is given."""
    with contextlib.ExitStack() as stack:

        def begin(sidecar: Sidecar, said: bytes) -> socket.socket:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.settimeout(PATIENCE_S)
            connection.connect(str(sidecar.upload))
            connection.sendall(said)
            return connection

        yield begin


def answer(connection: socket.socket) -> upload_wire.Answer:
    read = upload_wire.reader(connection)
    return upload_wire.answer_from_wire(upload_wire.read_message(read))


def objects(sidecar: Sidecar) -> list[str]:
    return [path.name for path in sidecar.files() if path.parent.name != "tmp"]


def until(holds) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_one_that_is_killed_in_an_upload_has_nothing_of_it_and_all_else(
    sidecar: Sidecar, begun: Begun
) -> None:
    store = sidecar.store()
    kept = store.put(os.urandom(MB), holder="e1")
    data = os.urandom(4 * MB)
    connection = begun(sidecar, upload_wire.header_to_wire(header_of(data)))
    assert answer(connection).send
    connection.sendall(data[: 3 * MB])

    sidecar.kill()
    connection.close()
    sidecar.start()

    assert objects(sidecar) == [kept.sha256]
    assert sidecar.store(far=True).get(kept)
    reference = store.put(data, holder="e1")
    assert (kept.epoch, reference.epoch) == (1, 2)
    assert store.get(reference) == data


@pytest.mark.parametrize(
    "where", ["payloads.upload.before_flush", "payloads.upload.before_name_flush"]
)
def test_a_crash_at_each_commit_boundary_of_an_upload_is_an_upload_again(
    tmp_path: Path, where: str
) -> None:
    sidecar = Sidecar(tmp_path)
    sidecar.start(TREADLE_FAILPOINTS=f"{where}=exit:9")
    data = os.urandom(MB)
    try:
        with pytest.raises(PayloadStoreAwayError):
            sidecar.store().put(data, holder="e1")
        assert sidecar.process is not None
        assert sidecar.process.wait(PATIENCE_S) == 9

        sidecar.start()
        store = sidecar.store(far=True)
        assert store.get(store.put(data, holder="e1")) == data
    finally:
        sidecar.kill()


def test_a_crash_before_a_release_deletes_is_a_release_again(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    sidecar.start(TREADLE_FAILPOINTS="payloads.release.before_delete=exit:9")
    store = sidecar.store()
    try:
        hold = Hold(store.put(b"tokens", holder="e1"), "e1")
        store.confirm([hold], writer_epoch=1)
        with pytest.raises(PayloadStoreAwayError):
            store.release([hold], writer_epoch=1)

        sidecar.start()
        store.release([hold], writer_epoch=1)
        assert objects(sidecar) == []
    finally:
        sidecar.kill()


def test_a_reader_waits_for_a_sidecar_that_comes_back(sidecar: Sidecar) -> None:
    data = os.urandom(16 * MB)
    reference = sidecar.store().put(data, holder="e1")
    sidecar.kill()
    far = sidecar.store(far=True)

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(far.fetch, [reference], timeout_s=PATIENCE_S)
        sidecar.start()
        assert reading.result()[reference.sha256] == data


def test_a_stream_that_breaks_goes_on_where_it_broke(sidecar: Sidecar) -> None:
    contents = [os.urandom(16 * MB) for _ in range(6)]
    store, far = sidecar.store(), sidecar.store(far=True)
    references = [store.put(content, holder="e1") for content in contents]

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(far.fetch, references, timeout_s=PATIENCE_S)
        sidecar.kill()
        sidecar.start()
        fetched = reading.result()

    assert [fetched[reference.sha256] for reference in references] == contents


def test_nobody_waits_longer_than_it_says_for_one_that_is_stopped(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_store, "CALL_S", 1.0)
    store, far = sidecar.store(), sidecar.store(far=True)
    reference = store.put(os.urandom(MB), holder="e1")
    sidecar.signal(signal.SIGSTOP)
    began = time.monotonic()

    with pytest.raises(PayloadStoreAwayError):
        store.put(b"tokens", holder="e1")
    with pytest.raises(PayloadStoreAwayError):
        store.confirm([Hold(reference, "e1")], writer_epoch=1)
    found = far.fetch([reference], timeout_s=1.0)[reference.sha256]
    assert isinstance(found, PayloadMissingError)
    assert not far.has(PayloadReference("0" * 64, 1, reference.node))

    assert time.monotonic() - began < 20.0
    assert store.get(reference)  # its file is on this node
    sidecar.signal(signal.SIGCONT)
    assert far.get(reference) == store.get(reference)


def test_a_node_that_is_away_keeps_no_other_from_its_releases(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_store, "CALL_S", 1.0)
    store = sidecar.store()
    reference = store.put(b"tokens", holder="e1")
    gone = PayloadReference(reference.sha256, 6, f"unix:{sidecar.directory}/nobody")

    with pytest.raises(PayloadStoreAwayError):
        store.release([Hold(gone, "e1"), Hold(reference, "e1")], writer_epoch=1)

    assert objects(sidecar) == []


def test_an_archive_serves_what_a_lost_node_had(tmp_path: Path) -> None:
    archive = str(tmp_path / "archive")
    with running(tmp_path, archive=archive) as sidecar:
        reference = sidecar.store().put(b"tokens", holder="e1")
    far = sidecar.store(far=True, archive=archive)

    found = far.fetch([reference], timeout_s=0.5)[reference.sha256]

    assert found == b"tokens"
    assert far.has(reference)


def test_damage_on_a_node_is_healed_by_the_archive(tmp_path: Path) -> None:
    archive = str(tmp_path / "archive")
    with running(tmp_path, archive=archive) as sidecar:
        store = sidecar.store(archive=archive)
        reference = store.put(b"tokens", holder="e1")
        FileStore(sidecar.spool).path(reference.sha256).write_bytes(b"tokans")

        assert store.get(reference) == b"tokens"


def test_a_full_budget_is_waited_for_and_drops_nothing(tmp_path: Path) -> None:
    with running(tmp_path, budget_bytes=3 * MB) as sidecar:
        store = sidecar.store()
        holds = [Hold(store.put(os.urandom(MB), holder=f"e{n}"), f"e{n}") for n in range(3)]
        for hold in holds:
            store.confirm([hold], writer_epoch=1)

        with pytest.raises(PayloadStoreFullError) as raised:
            store.put(os.urandom(MB), holder="e9")
        assert raised.value.retry_after_s
        assert raised.value.limit == str(3 * MB)
        with pytest.raises(TreadleError) as raised:
            store.put(os.urandom(4 * MB), holder="e9")
        assert raised.value.reason == InvalidFieldError.reason

        assert sorted(objects(sidecar)) == sorted(hold.reference.sha256 for hold in holds)
        store.release(holds[:1], writer_epoch=1)
        store.put(os.urandom(MB), holder="e9")


LIMITED = ("prlimit", f"--fsize={MB}", "--")


def test_a_full_disk_says_so_and_keeps_nothing(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path, inside=LIMITED)
    sidecar.start()
    try:
        store = sidecar.store()
        with pytest.raises(PayloadStoreFullError) as raised:
            store.put(os.urandom(2 * MB), holder="e1")
        assert raised.value.retry_after_s
        assert sidecar.files() == []
        assert store.get(store.put(b"tokens", holder="e1")) == b"tokens"
    finally:
        sidecar.kill()


@pytest.mark.parametrize("sent", [0, MB // 2])
def test_an_upload_that_is_cut_leaves_nothing_and_frees_its_room(
    tmp_path: Path, sent: int, begun: Begun
) -> None:
    with running(tmp_path, budget_bytes=MB) as sidecar:
        data = os.urandom(MB)
        connection = begun(sidecar, upload_wire.header_to_wire(header_of(data)))
        assert answer(connection).send
        connection.sendall(data[:sent])
        connection.close()

        def taken() -> bool:
            try:
                sidecar.store().put(data, holder="e1")
            except PayloadStoreFullError:
                return False
            return True

        until(taken)
        assert objects(sidecar) == [PayloadReference.of(data).sha256]
        until(lambda: not list((sidecar.spool / "tmp").iterdir()))


def test_bytes_that_are_not_what_was_said_are_refused(sidecar: Sidecar, begun: Begun) -> None:
    data = os.urandom(MB)
    connection = begun(sidecar, upload_wire.header_to_wire(header_of(data)))
    assert answer(connection).send
    connection.sendall(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(PayloadCorruptError) as raised:
        answer(connection)

    assert (raised.value.field, objects(sidecar)) == ("sha256", [])


@pytest.mark.parametrize(
    ("changed", "field", "error"),
    [
        pytest.param({"run_id": ""}, "run_id", InvalidFieldError, id="G3-no-run"),
        pytest.param({"holder": ""}, "holder", InvalidFieldError, id="G3-no-holder"),
        pytest.param({"run_id": "other"}, "run_id", WrongRunError, id="another-run"),
        pytest.param({"sha256": "../../etc/passwd"}, "sha256", InvalidFieldError, id="G4-path"),
        pytest.param({"sha256": "A" * 64}, "sha256", InvalidFieldError, id="G4-upper"),
        pytest.param({"holder": "a/../b"}, "holder", InvalidFieldError, id="G4-holder"),
        pytest.param({"holder": "a\n"}, "holder", InvalidFieldError, id="G4-newline"),
        pytest.param({"holder": "a" * 129}, "holder", InvalidFieldError, id="G4-long"),
        pytest.param({"size": -1}, "size", InvalidFieldError, id="G5-negative"),
        pytest.param({"size": 2**62}, "size", InvalidFieldError, id="G12-huge"),
        pytest.param({"size": "5"}, "size", InvalidFieldError, id="size-text"),
        pytest.param({"size": True}, "size", InvalidFieldError, id="size-bool"),
        pytest.param({"sha256": None}, "sha256", InvalidFieldError, id="no-key"),
    ],
)
def test_a_bad_header_is_refused_by_the_name_of_its_field(
    shared: Sidecar, changed: dict, field: str, error: type[TreadleError], begun: Begun
) -> None:
    header = header_of(b"tokens", **changed)

    with pytest.raises(TreadleError) as raised:
        answer(begun(shared, upload_wire.header_to_wire(header)))

    assert (raised.value.reason, raised.value.field) == (error.reason, field)
    assert "Traceback" not in raised.value.message
    assert shared.store().put(b"tokens", holder="e1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with running(tmp_path_factory.mktemp("node")) as made:
        yield made


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(framed(b""), id="empty"),
        pytest.param(struct.pack(">I", 2**32 - 1), id="G1-length"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(framed(b"{")[:3], id="cut"),
    ],
)
def test_what_is_no_upload_ends_the_connection(shared: Sidecar, said: bytes, begun: Begun) -> None:
    connection = begun(shared, said)
    connection.shutdown(socket.SHUT_WR)

    with pytest.raises((BrokenUploadError, ConnectionResetError)):
        answer(connection)

    assert shared.store().put(b"tokens", holder="e1")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[]", id="array"),
        pytest.param(b"{", id="truncated"),
        pytest.param(b"\xff\xfe", id="not-text"),
        pytest.param(b"[" * 4096, id="G27-deep"),
        pytest.param(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94.", id="G13-pickle"),
        pytest.param(b"{}", id="nothing"),
    ],
)
def test_a_header_that_is_none_is_refused(shared: Sidecar, body: bytes, begun: Begun) -> None:
    with pytest.raises(TreadleError) as raised:
        answer(begun(shared, framed(body)))

    assert raised.value.reason == InvalidFieldError.reason
    assert shared.store().put(b"tokens", holder="e1")


def test_more_uploaders_than_places_all_get_their_turn(shared: Sidecar) -> None:
    store = shared.store()
    contents = [os.urandom(70_000) for _ in range(100)]

    with ThreadPoolExecutor(50) as threads:
        references = list(threads.map(lambda data: store.put(data, holder="e1"), contents))

    fetched = shared.store(far=True).fetch(references, timeout_s=PATIENCE_S)
    assert [fetched[reference.sha256] for reference in references] == contents


def test_a_drain_ends_it_while_uploads_are_on_their_way(sidecar: Sidecar, begun: Begun) -> None:
    connection = begun(sidecar, upload_wire.header_to_wire(header_of(os.urandom(MB))))
    assert answer(connection).send
    assert sidecar.process is not None

    sidecar.signal(signal.SIGTERM)

    assert sidecar.process.wait(PATIENCE_S) == 0
    assert threading.active_count() < 10
    assert sidecar.files() == []
