import hashlib
import io
import json
import os
import time
from pathlib import Path

import pytest

from treadle_core.errors import InvalidFieldError, PayloadCorruptError
from treadle_payloads.files import FileStore
from treadle_payloads.spool import Source, Spool
from treadle_payloads.store import (
    Hold,
    PayloadKeeperFencedError,
    PayloadReference,
    PayloadStoreFullError,
)


def spool_in(directory: Path, *, budget: int = 1000, **changed) -> Spool:
    return Spool(directory, budget_bytes=budget, **changed)


def source(data: bytes) -> Source:
    return io.BytesIO(data).readinto


def put(spool: Spool, data: bytes, holder: str = "e1", *, sent: bytes | None = None):
    reference = PayloadReference.of(data)
    spool.put(reference, holder, lambda: source(data if sent is None else sent))
    return reference


def never() -> Source:
    raise AssertionError("the bytes are here")


def whole(spool: Spool) -> set[str]:
    return {sha256 for sha256, _ in spool.files.objects()}


def test_bytes_that_are_here_are_not_asked_for_again(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    reference = put(spool, b"tokens")

    spool.put(reference, "e2", never)

    assert (spool.used_bytes, spool.objects) == (6, 1)


def test_what_an_epoch_before_left_is_read_before_it_is_trusted(tmp_path: Path) -> None:
    first = spool_in(tmp_path)
    good, bad = put(first, b"tokens"), put(first, b"damage")
    first.files.path(bad.sha256).write_bytes(b"domage")

    second = spool_in(tmp_path)

    assert second.epoch == first.epoch + 1
    second.put(good, "e1", never)
    put(second, b"damage")
    assert second.files.get(bad) == b"damage"
    assert second.used_bytes == 12


@pytest.mark.parametrize("sent", [b"", b"token", b"tokans"], ids=["none", "cut", "flip"])
def test_an_upload_of_other_bytes_leaves_nothing(tmp_path: Path, sent: bytes) -> None:
    spool = spool_in(tmp_path)

    with pytest.raises(PayloadCorruptError):
        put(spool, b"tokens", sent=sent)

    assert (spool.used_bytes, whole(spool)) == (0, set())
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_source_that_breaks_leaves_nothing(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)

    def broken() -> Source:
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        spool.put(PayloadReference.of(b"tokens"), "e1", broken)

    assert spool.used_bytes == 0


def test_the_budget_counts_what_is_on_its_way(tmp_path: Path) -> None:
    spool = spool_in(tmp_path, budget=10)
    refused: list[PayloadStoreFullError] = []

    def meanwhile() -> Source:
        with pytest.raises(PayloadStoreFullError) as raised:
            put(spool, b"others")
        refused.append(raised.value)
        return source(b"tokens")

    reference = PayloadReference.of(b"tokens")
    spool.put(reference, "e1", meanwhile)

    assert (refused[0].limit, refused[0].value) == ("10", "6")
    assert refused[0].retry_after_s
    spool.confirm([Hold(reference, "e1")], writer_epoch=1)
    assert spool.release([Hold(reference, "e1")], writer_epoch=1) == 1
    put(spool, b"others")


def test_what_would_never_have_room_is_no_matter_of_waiting(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="budget"):
        put(spool_in(tmp_path, budget=5), b"tokens")


def test_a_release_waits_for_whoever_else_needs_the_bytes(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    reference = put(spool, b"tokens", "e1")
    spool.confirm([Hold(reference, "e1")], writer_epoch=1)
    put(spool, b"tokens", "e2")  # not confirmed yet

    assert spool.release([Hold(reference, "e1")], writer_epoch=1) == 0
    assert spool.files.has(reference)
    assert spool.release([Hold(reference, "e2")], writer_epoch=1) == 1
    assert not spool.files.has(reference)
    late = Hold(reference, "e3")
    assert spool.confirm([late], writer_epoch=1) == [late]


def test_a_writer_that_was_replaced_is_refused_also_by_a_later_epoch(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    reference = put(spool, b"tokens")
    hold = Hold(reference, "e1")
    spool.confirm([hold], writer_epoch=7)

    for each in (spool, spool_in(tmp_path)):
        with pytest.raises(PayloadKeeperFencedError) as raised:
            each.release([hold], writer_epoch=6)
        assert (raised.value.limit, raised.value.value) == ("7", "6")
        with pytest.raises(PayloadKeeperFencedError):
            each.confirm([hold], writer_epoch=6)
        assert each.files.has(reference)
    assert json.loads((tmp_path / "life.json").read_text())["writer_epoch"] == 7


def age(spool: Spool, reference: PayloadReference) -> None:
    long_ago = time.time() - 10 * spool.pin_s
    os.utime(spool.files.path(reference.sha256), (long_ago, long_ago))


def test_only_what_no_attempt_pins_is_idle(tmp_path: Path) -> None:
    now = [0.0]
    spool = spool_in(tmp_path, clock=lambda: now[0], pin_s=10.0)
    pinned, confirmed = put(spool, b"pinned"), put(spool, b"confirmed")
    spool.confirm([Hold(confirmed, "e1")], writer_epoch=1)
    for reference in (pinned, confirmed):
        age(spool, reference)

    assert {stay.sha256 for stay in spool.idle()} == {confirmed.sha256}
    now[0] = 10.0
    assert {stay.sha256 for stay in spool.idle()} == {pinned.sha256, confirmed.sha256}


@pytest.mark.parametrize("touch", ["put", "confirm", "nothing"])
def test_what_was_touched_since_it_was_idle_is_not_dropped(tmp_path: Path, touch: str) -> None:
    spool = spool_in(tmp_path)
    reference = put(spool, b"tokens")
    spool = spool_in(tmp_path)
    age(spool, reference)
    (stay,) = spool.idle()

    if touch == "put":
        put(spool, b"tokens")
    elif touch == "confirm":
        spool.confirm([Hold(reference, "e1")], writer_epoch=1)

    assert spool.drop(stay, writer_epoch=1) is (touch == "nothing")
    assert spool.files.has(reference) is (touch != "nothing")


def test_a_writer_that_was_replaced_drops_nothing(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    reference = put(spool, b"tokens")
    spool.confirm([Hold(put(spool, b"others"), "e1")], writer_epoch=2)
    age(spool, reference)
    spool = spool_in(tmp_path)
    (stay,) = spool.idle()

    with pytest.raises(PayloadKeeperFencedError):
        spool.drop(stay, writer_epoch=1)

    assert spool.files.has(reference)


def test_an_archive_has_what_is_acknowledged_and_loses_what_is_released(tmp_path: Path) -> None:
    spool = spool_in(tmp_path / "spool", archive=tmp_path / "archive")
    archive = FileStore(tmp_path / "archive")
    reference = put(spool, b"tokens")

    assert archive.get(reference) == b"tokens"
    spool.release([Hold(reference, "e1")], writer_epoch=1)
    assert not archive.has(reference)


def test_the_name_of_an_object_is_the_sha256_of_its_bytes(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    put(spool, b"tokens")

    (name,) = whole(spool)
    assert name == hashlib.sha256(b"tokens").hexdigest()
    assert (tmp_path / name[:2] / name).read_bytes() == b"tokens"


def test_a_shared_object_stays_when_a_hold_of_it_ends(tmp_path: Path) -> None:
    reference = put(spool_in(tmp_path), b"image")
    spool = spool_in(tmp_path)  # a later epoch, which knows of no hold

    deleted = spool.release([Hold(reference, "e1", shared=True)], writer_epoch=1)

    assert (deleted, whole(spool)) == (0, {reference.sha256})


def test_an_object_goes_with_its_last_hold_when_others_ended_before(tmp_path: Path) -> None:
    spool = spool_in(tmp_path)
    reference = put(spool, b"image", "e1")
    put(spool, b"image", "e2")
    spool.confirm([Hold(reference, "e1"), Hold(reference, "e2")], writer_epoch=1)

    early = spool.release([Hold(reference, "e1", shared=True)], writer_epoch=1)
    last = spool.release([Hold(reference, "e2")], writer_epoch=1)

    assert (early, last, whole(spool)) == (0, 1, set())
