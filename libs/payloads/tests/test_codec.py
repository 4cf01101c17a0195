import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.episode.v1 import episode_pb2 as pb
from treadle_core.episodes import NO_VERSION, Segment
from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_core.media import MediumSpan
from treadle_payloads.codec import decode_payload, encode_payload

ARRAYS = ("token_ids", "sampled", "trained", "logprobs", "policy_version", "context_version")


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    size = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    sampled = rng.random(size) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    policy = np.where(sampled, rng.integers(0, 3, size), NO_VERSION).astype(np.int32)
    return Segment(
        token_ids=rng.integers(0, 2**31 - 1, size, dtype=np.int32),
        sampled=sampled,
        trained=sampled & (rng.random(size) < 0.8),
        logprobs=np.where(sampled, -rng.random(size), 0).astype(np.float32),
        policy_version=policy,
        context_version=np.where(sampled, policy // 2, NO_VERSION).astype(np.int32),
        temperature=draw(st.floats(0, 2, width=32)),
        media=tuple(
            MediumSpan(f"{start:064x}", int(start), 1)
            for start in np.flatnonzero(~sampled)
            if rng.random() < 0.3
        ),
    )


payloads = st.lists(segments(), min_size=1, max_size=4)


def message_of(tokens: int = 3) -> pb.EpisodePayload:
    sampled = np.arange(tokens) > 0
    versions = np.where(sampled, 7, NO_VERSION).astype(np.int32)
    segment = Segment(
        token_ids=np.arange(tokens, dtype=np.int32),
        sampled=sampled,
        trained=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        policy_version=versions,
        context_version=versions,
    )
    return pb.EpisodePayload.FromString(encode_payload([segment]))


@given(payloads)
def test_decoding_gives_back_what_was_encoded(given_segments: list[Segment]) -> None:
    decoded = decode_payload(encode_payload(given_segments))

    assert len(decoded) == len(given_segments)
    for one, other in zip(decoded, given_segments, strict=True):
        assert (one.temperature, one.media) == (other.temperature, other.media)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
            assert not getattr(one, name).flags.writeable


@given(payloads)
def test_equal_segments_give_equal_bytes(given_segments: list[Segment]) -> None:
    data = encode_payload(given_segments)

    assert encode_payload(decode_payload(data)) == data


def test_versions_travel_as_runs() -> None:
    message = message_of(tokens=1000)

    assert [(s.version, s.length) for s in message.segments[0].policy_version] == [
        (NO_VERSION, 1),
        (7, 999),
    ]


@given(st.binary(max_size=400))
def test_random_bytes_raise_a_typed_error(data: bytes) -> None:
    with pytest.raises(TreadleError):
        decode_payload(data)


def decodes(data: bytes) -> bool:
    """Whether the bytes hold segments; every error but a typed one that names a field escapes."""
    try:
        decoded = decode_payload(data)
    except TreadleError as error:
        if not error.field:
            raise
        return False
    return all(isinstance(segment, Segment) for segment in decoded)


@given(payloads, st.integers(0, 2**32))
def test_damaged_bytes_give_segments_or_a_typed_error(
    given_segments: list[Segment], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    data = bytearray(encode_payload(given_segments))
    for _ in range(rng.integers(1, 5)):
        at = int(rng.integers(len(data)))
        match rng.integers(3):
            case 0:
                data[at] ^= 1 << int(rng.integers(8))
            case 1:
                del data[at : at + int(rng.integers(1, 9))]
            case _:
                data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        data = data or bytearray(b"\0")

    assert decodes(bytes(data)) in (True, False)


numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, 2, 3, 4, 2**60]))
arrays = st.builds(
    pb.Array,
    dtype=st.sampled_from(["bool", "int16", "int32", "int64", "float32", "bfloat16", "O", ""]),
    shape=st.lists(numbers, max_size=4),
    data=st.one_of(st.binary(max_size=24), st.sampled_from([b"\0" * 3, b"\0" * 12])),
)
spans = st.lists(
    st.builds(pb.VersionSpan, version=st.integers(-(2**31), 2**31 - 1), length=numbers),
    max_size=3,
)
wires = st.builds(
    pb.Segment,
    token_ids=st.one_of(arrays, st.just(message_of().segments[0].token_ids)),
    sampled=st.one_of(arrays, st.just(message_of().segments[0].sampled)),
    trained=st.one_of(arrays, st.just(message_of().segments[0].trained)),
    logprobs=st.one_of(arrays, st.just(message_of().segments[0].logprobs)),
    policy_version=spans,
    context_version=spans,
    temperature=st.floats(width=32),
)


@given(st.lists(wires, max_size=3))
def test_any_message_gives_segments_or_a_typed_error(given_wires: list[pb.Segment]) -> None:
    data = pb.EpisodePayload(segments=given_wires).SerializeToString()

    assert decodes(data) in (True, False)


def broken(case: str) -> pb.EpisodePayload:
    message = message_of()
    segment = message.segments[0]
    match case:
        case "short-mask":
            segment.trained.shape[0] = 2
            segment.trained.data = segment.trained.data[:2]
        case "nan":
            segment.logprobs.data = np.array([0, np.nan, -1], "<f4").tobytes()
        case "positive":
            segment.logprobs.data = np.array([0, 0.1, -1], "<f4").tobytes()
        case "negative-token":
            segment.token_ids.data = np.array([0, -1, 2], "<i4").tobytes()
        case "dtype-lie":
            segment.logprobs.dtype = "int16"
        case "bfloat16":
            segment.logprobs.dtype = "bfloat16"
        case "object":
            segment.token_ids.dtype = "object"
        case "bytes-lie":
            segment.logprobs.data += b"\0\0\0\0"
        case "huge-shape":
            segment.logprobs.shape[0] = 2**60
        case "overflowing-shape":
            segment.logprobs.shape[:] = [2**62, 2**62, 2**62]
        case "negative-shape":
            segment.logprobs.shape[:] = [-1, -3]
        case "two-axes":
            segment.sampled.shape[:] = [3, 1]
        case "no-tokens":
            segment.token_ids.shape[0] = 0
            segment.token_ids.data = b""
        case "scalar":
            segment.token_ids.shape[:] = []
            segment.token_ids.data = b"\0\0\0\0"
        case "bool-2":
            segment.sampled.data = b"\0\1\2"
        case "span-sum":
            segment.policy_version[1].length = 2**60
        case "span-zero":
            segment.context_version[0].length = 0
        case "span-negative":
            segment.context_version[0].length = -(2**40)
        case "missing":
            segment.ClearField("sampled")
        case "temperature":
            segment.temperature = float("nan")
    return message


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ("short-mask", "segments[0].trained"),
        ("nan", "segments[0].logprobs"),
        ("positive", "segments[0].logprobs"),
        ("negative-token", "segments[0].token_ids"),
        ("dtype-lie", "segments[0].logprobs.dtype"),
        ("bfloat16", "segments[0].logprobs.dtype"),
        ("object", "segments[0].token_ids.dtype"),
        ("bytes-lie", "segments[0].logprobs"),
        ("huge-shape", "segments[0].logprobs"),
        ("overflowing-shape", "segments[0].logprobs.shape"),
        ("negative-shape", "segments[0].logprobs.shape"),
        ("two-axes", "segments[0].sampled.shape"),
        ("no-tokens", "segments[0].token_ids"),
        ("scalar", "segments[0].token_ids.shape"),
        ("bool-2", "segments[0].sampled"),
        ("span-sum", "segments[0].policy_version"),
        ("span-zero", "segments[0].context_version"),
        ("span-negative", "segments[0].context_version"),
        ("missing", "segments[0].sampled.dtype"),
        ("temperature", "segments[0].temperature"),
    ],
)
def test_a_broken_field_is_named_before_anything_is_allocated(case: str, field: str) -> None:
    data = broken(case).SerializeToString()

    tracemalloc.start()
    with pytest.raises(InvalidFieldError) as raised:
        decode_payload(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert raised.value.field == field
    assert raised.value.limit
    assert peak < 1_000_000


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00]\x94.", id="pickle"),
        pytest.param(b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order'", id="npy"),
        pytest.param(b'{"segments": []}', id="json"),
    ],
)
def test_another_encoding_is_refused_as_unsupported(data: bytes) -> None:
    with pytest.raises(InvalidFieldError, match="unsupported encoding"):
        decode_payload(data)


@pytest.mark.parametrize("data", [b"", pb.EpisodePayload().SerializeToString()])
def test_a_payload_without_segments_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidFieldError, match="segments"):
        decode_payload(data)
    with pytest.raises(InvalidFieldError, match="segments"):
        encode_payload([])


@pytest.mark.parametrize(
    ("spans", "field"),
    [
        pytest.param([{"sha256": "a", "length": 1}], "media[0].sha256", id="sha256"),
        pytest.param([{"start": -1, "length": 1}], "media[0].start", id="start"),
        pytest.param([{"length": 0}], "media[0].length", id="length"),
        pytest.param([{"length": 2**62}], "media[0].length", id="beyond-the-end"),
        pytest.param([{"start": 2**62, "length": 2**62}], "media[0].length", id="overflow"),
        pytest.param([{"length": 2}], "media[0]", id="sampled"),
        pytest.param([{"length": 1}] * 2, "media[1].start", id="overlap"),
        pytest.param([{"length": 1}] * 4, "media", id="more-than-tokens"),
    ],
)
def test_spans_of_media_that_cannot_be_are_refused_by_field(
    spans: list[dict[str, object]], field: str
) -> None:
    message = message_of()
    message.segments[0].media.extend(pb.MediumSpan(**{"sha256": "a" * 64} | each) for each in spans)

    with pytest.raises(InvalidFieldError) as refused:
        decode_payload(message.SerializeToString())

    assert refused.value.field == f"segments[0].{field}"
