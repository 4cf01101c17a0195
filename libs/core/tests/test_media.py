import dataclasses

import numpy as np
import pytest

from treadle_core.episodes import Episode, Segment, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MAX_MEDIA, MAX_MEDIUM_BYTES, Medium, MediumSpan

CAT, DOG = Medium.of(b"cat", "image/png"), Medium.of(b"dog", "image/jpeg")


def segment(*spans: MediumSpan) -> Segment:
    """Eight tokens, of which the last two are sampled."""
    sampled = np.arange(8) >= 6
    versions = np.where(sampled, 1, -1).astype(np.int32)
    return Segment(
        token_ids=np.arange(8, dtype=np.int32),
        sampled=sampled,
        trained=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        policy_version=versions,
        context_version=versions,
        media=spans,
    )


def span(start: int, length: int, medium: Medium = CAT) -> MediumSpan:
    return MediumSpan(medium.sha256, start, length)


def episode(media: tuple[Medium, ...], *shown: Segment) -> Episode:
    return Episode(shown, None, Termination.FINISHED, media=media)


def test_an_episode_shows_its_media_wherever_and_as_often_as_it_likes() -> None:
    shown = segment(span(0, 2), span(2, 1, DOG), span(4, 2))

    made = episode((CAT, DOG), shown, segment(), segment(span(0, 6, DOG)))

    assert [each.end for each in made.segments[0].media] == [2, 3, 6]


@pytest.mark.parametrize(
    ("spans", "field"),
    [
        pytest.param([(0, 2), (1, 1)], "media[1].start", id="overlap"),
        pytest.param([(3, 2), (0, 2)], "media[1].start", id="descending"),
        pytest.param([(0, 1), (5, 4)], "media[1].length", id="beyond-the-end"),
        pytest.param([(0, 2**62)], "media[0].length", id="far-beyond-the-end"),
        pytest.param([(5, 2)], "media[0]", id="over-a-sampled-token"),
    ],
)
def test_spans_that_no_segment_can_have_are_refused(
    spans: list[tuple[int, int]], field: str
) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        segment(*(span(*each) for each in spans))

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("sha256", "A" * 64, id="upper-case"),
        pytest.param("sha256", "../" + "a" * 61, id="path"),
        pytest.param("start", -1, id="negative"),
        pytest.param("length", 0, id="empty"),
    ],
)
def test_a_span_of_nothing_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        dataclasses.replace(span(0, 1), **{field: value})

    assert refused.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("sha256", "a" * 63, id="short"),
        pytest.param("size", 0, id="empty"),
        pytest.param("size", -1, id="negative"),
        pytest.param("size", MAX_MEDIUM_BYTES + 1, id="large"),
        pytest.param("media_type", "text/html", id="no-image"),
        pytest.param("media_type", "image/png" + "x" * 10_000, id="long"),
        pytest.param("epoch", -1, id="epoch"),
    ],
)
def test_a_medium_that_cannot_be_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        dataclasses.replace(CAT, **{field: value})

    assert refused.value.field == field
    assert len(refused.value.value) < 200


def test_media_and_spans_name_each_other_once() -> None:
    shown = segment(span(0, 2), span(2, 2, DOG))

    for media, field in (
        ((CAT,), "segments[1].media[1].sha256"),
        ((CAT, DOG, CAT), "media[2].sha256"),
        ((CAT, DOG, Medium.of(b"cow", "image/png")), "media[2].sha256"),
    ):
        with pytest.raises(InvalidFieldError) as refused:
            episode(media, segment(), shown)
        assert refused.value.field == field


def test_an_episode_has_a_bounded_number_of_media() -> None:
    many = tuple(Medium.of(str(n).encode(), "image/gif") for n in range(MAX_MEDIA + 1))

    with pytest.raises(InvalidFieldError, match="at most 256 entries, got 257"):
        episode(many)
