"""Segments to bytes and back: the serialised `treadle.episode.v1.EpisodePayload`.

Whatever the bytes hold, decoding either returns segments or raises InvalidFieldError naming the
field, its limit and the value; sizes are compared as Python integers before anything is allocated.

Shapes: T = tokens of one segment.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from treadle.episode.v1 import episode_pb2 as pb
from treadle_core.episodes import Segment
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan
from treadle_payloads.store import Buffer

_DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.bool_),
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
}
_ARRAYS = {"token_ids": "int32", "sampled": "bool", "trained": "bool", "logprobs": "float32"}
_VERSIONS = ("policy_version", "context_version")
_MAX_QUOTED = 64


def encode_payload(segments: Sequence[Segment]) -> bytes:
    """The bytes of an episode's segments; equal segments give equal bytes.

    Raises InvalidFieldError when there is no segment.
    """
    if not segments:
        raise InvalidFieldError("segments", limit="at least one", value=0)
    message = pb.EpisodePayload(segments=map(_segment_to_wire, segments))
    return message.SerializeToString(deterministic=True)


def decode_payload(data: Buffer) -> tuple[Segment, ...]:
    """The segments of `data`; their arrays are read-only and little-endian.

    Raises InvalidFieldError, naming for example `segments[0].logprobs`.
    """
    try:
        message = pb.EpisodePayload.FromString(cast("bytes", data))  # any buffer will do
    except DecodeError as error:
        raise InvalidFieldError(
            "payload",
            limit="a serialised treadle.episode.v1.EpisodePayload",
            value=f"an unsupported encoding of {len(data)} bytes",
        ) from error
    if not message.segments:
        raise InvalidFieldError("segments", limit="at least one", value=0)
    return tuple(
        _segment_from_wire(segment, f"segments[{index}]")
        for index, segment in enumerate(message.segments)
    )


def _segment_to_wire(segment: Segment) -> pb.Segment:
    arrays = {
        name: _array_to_wire(getattr(segment, name), dtype) for name, dtype in _ARRAYS.items()
    }
    return pb.Segment(
        **arrays,
        policy_version=_spans_of(segment.policy_version),
        context_version=_spans_of(segment.context_version),
        temperature=segment.temperature,
        media=[
            pb.MediumSpan(sha256=span.sha256, start=span.start, length=span.length)
            for span in segment.media
        ],
    )


def _segment_from_wire(message: pb.Segment, field: str) -> Segment:
    arrays = {
        name: _array_from_wire(getattr(message, name), dtype, f"{field}.{name}")
        for name, dtype in _ARRAYS.items()
    }
    num_tokens = arrays["token_ids"].size
    if not num_tokens:
        raise InvalidFieldError(f"{field}.token_ids", limit="shape [T], T >= 1", value="[0]")
    for name in _VERSIONS:
        arrays[name] = _versions_of(getattr(message, name), num_tokens, f"{field}.{name}")
    media = _media_from_wire(message.media, num_tokens, field)
    try:
        return Segment(**arrays, temperature=message.temperature, media=media)
    except InvalidFieldError as error:
        raise InvalidFieldError(
            f"{field}.{error.field}", limit=error.limit, value=error.value
        ) from error


def _media_from_wire(
    messages: Sequence[pb.MediumSpan], num_tokens: int, field: str
) -> tuple[MediumSpan, ...]:
    if len(messages) > num_tokens:
        limit = f"at most {num_tokens} spans, one a token"
        raise InvalidFieldError(f"{field}.media", limit=limit, value=len(messages))
    spans: list[MediumSpan] = []
    for index, message in enumerate(messages):
        try:
            spans.append(MediumSpan(message.sha256, message.start, message.length))
        except InvalidFieldError as error:
            name = f"{field}.media[{index}].{error.field}"
            raise InvalidFieldError(name, limit=error.limit, value=error.value) from error
    return tuple(spans)


def _array_to_wire(array: NDArray[Any], dtype: str) -> pb.Array:
    data = array.astype(_DTYPES[dtype], copy=False).tobytes()
    return pb.Array(dtype=dtype, shape=array.shape, data=data)


def _array_from_wire(message: pb.Array, dtype: str, field: str) -> NDArray[Any]:
    """A read-only view of the message's bytes; nothing is allocated for what they do not hold."""
    if message.dtype != dtype:
        value = f"an unsupported encoding {_quoted(message.dtype)}"
        raise InvalidFieldError(f"{field}.dtype", limit=dtype, value=value)
    if len(message.shape) != 1 or message.shape[0] < 0:
        raise InvalidFieldError(
            f"{field}.shape", limit="[T], T >= 0", value=_quoted(list(message.shape))
        )
    data = message.data  # one read: each read of a bytes field is a copy
    size = message.shape[0] * _DTYPES[dtype].itemsize
    if size != len(data):
        raise InvalidFieldError(
            field, limit=f"{size} bytes as {message.shape[0]} of {dtype}", value=len(data)
        )
    if dtype == "bool" and (largest := np.frombuffer(data, np.uint8).max(initial=0)) > 1:
        raise InvalidFieldError(field, limit="bytes 0 or 1", value=largest)
    flat = np.frombuffer(data, _DTYPES[dtype])
    return flat.astype(flat.dtype.newbyteorder("="), copy=False)


def _spans_of(versions: NDArray[np.int32]) -> list[pb.VersionSpan]:
    """Run-length coding of an int32 [T], T >= 1."""
    starts = np.flatnonzero(np.diff(versions, prepend=versions[0] - 1))
    lengths = np.diff(starts, append=versions.size)
    return [
        pb.VersionSpan(version=int(versions[start]), length=int(length))
        for start, length in zip(starts, lengths, strict=True)
    ]


def _versions_of(spans: Sequence[pb.VersionSpan], num_tokens: int, field: str) -> NDArray[np.int32]:
    """The int32 [T] that spans stand for; expanded only once their lengths sum to `num_tokens`."""
    lengths = [span.length for span in spans]
    if any(length < 1 for length in lengths):
        raise InvalidFieldError(field, limit="span lengths >= 1", value=min(lengths))
    if sum(lengths) != num_tokens:
        raise InvalidFieldError(
            field, limit=f"{num_tokens} tokens as token_ids", value=f"{sum(lengths)} in spans"
        )
    versions = np.repeat(np.array([span.version for span in spans], np.int32), lengths)
    versions.flags.writeable = False
    return versions


def _quoted(value: object) -> str:
    """`value` as text, short enough for an error."""
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…"
