from pathlib import Path

import pytest

from treadle.episode.v1 import episode_pb2 as pb
from treadle_core.errors import InvalidFieldError, PayloadCorruptError, PayloadMissingError
from treadle_core.media import MAX_MEDIA, Medium
from treadle_payloads.files import FileStore
from treadle_payloads.media import (
    fetch_media,
    media_from_wire,
    medium_to_wire,
    put_medium,
    reference_of,
)

CAT, DOG = Medium.of(b"cat", "image/png"), Medium.of(b"dog", "image/webp")


def test_a_medium_is_stored_once_whoever_shows_it(tmp_path: Path) -> None:
    store = FileStore(tmp_path)

    placed = {put_medium(CAT, b"cat", store, holder=f"e{n}") for n in range(16)}

    assert placed == {CAT}
    assert [sha256 for sha256, _ in store.objects()] == [CAT.sha256]


def test_bytes_that_are_not_the_medium_are_not_stored(tmp_path: Path) -> None:
    store = FileStore(tmp_path)

    for data, field in ((b"cot", "sha256"), (b"cats", "size")):
        with pytest.raises(PayloadCorruptError) as refused:
            put_medium(CAT, data, store, holder="e1")
        assert refused.value.field == field

    assert list(store.objects()) == []


def test_what_is_fetched_is_checked_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    cow = Medium.of(b"cow", "image/gif")
    for medium, data in ((CAT, b"cat"), (DOG, b"dog")):
        put_medium(medium, data, store, holder="e1")
    store.path(DOG.sha256).write_bytes(b"dig")

    found = fetch_media([CAT, DOG, cow, CAT], store)

    assert found[CAT.sha256] == b"cat"
    assert isinstance(found[DOG.sha256], PayloadCorruptError)
    assert isinstance(found[cow.sha256], PayloadMissingError)
    assert fetch_media([], store) == {}


def test_media_come_back_from_their_messages() -> None:
    far = Medium(DOG.sha256, 3, "image/webp", "unix:/node", 7)

    assert media_from_wire([medium_to_wire(CAT), medium_to_wire(far)], "media") == (CAT, far)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        pytest.param({"sha256": "x"}, "sha256", id="sha256"),
        pytest.param({"size": -1}, "size", id="size"),
        pytest.param({"media_type": "text/html"}, "media_type", id="media-type"),
        pytest.param({"node": "http://elsewhere/"}, "node", id="node"),
        pytest.param({"epoch": -1}, "epoch", id="epoch"),
        pytest.param({"sha256": CAT.sha256}, "sha256", id="twice"),
    ],
)
def test_a_bad_message_is_refused_by_field(changed: dict[str, object], field: str) -> None:
    bad = medium_to_wire(DOG)
    bad.MergeFrom(pb.Medium(**changed))

    with pytest.raises(InvalidFieldError) as refused:
        media_from_wire([medium_to_wire(CAT), bad], "result.media")

    assert refused.value.field == f"result.media[1].{field}"


def test_too_many_messages_are_refused_before_they_are_read() -> None:
    with pytest.raises(InvalidFieldError) as refused:
        media_from_wire([pb.Medium()] * (MAX_MEDIA + 1), "result.media")

    assert (refused.value.field, refused.value.value) == ("result.media", "257")


def test_a_reference_to_a_medium_says_where_it_lies() -> None:
    reference = reference_of(Medium(CAT.sha256, 3, "image/png", "host:1", 2))

    assert (reference.node, reference.epoch) == ("host:1", 2)
