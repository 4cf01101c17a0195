"""How the records of the vocabulary travel in frames, and back."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.episodes import Segment
from treadle_core.errors import Kind, TreadleError
from treadle_core.media import MediumSpan
from treadle_core.tickets import Sampling
from treadle_gateway.terms import Outcome, SessionSpec


class PolicyError(TreadleError):
    """The replica could not sample; says what it was told there."""

    reason = "POLICY"

    def __init__(self, kind: Kind, message: str, field: str, retry_after_s: float | None) -> None:
        super().__init__(message, field=field, retry_after_s=retry_after_s)
        self.kind = kind


def ids_to_bytes(ids: NDArray[np.int32]) -> bytes:
    """Token ids as bytes."""
    return ids.astype("<i4", copy=False).tobytes()


def ids_from_bytes(raw: bytes) -> NDArray[np.int32]:
    """Token ids of bytes; not writable."""
    return np.frombuffer(raw, "<i4").astype(np.int32, copy=False)


def pieces_to_list(pieces: Sequence[Generated]) -> list[Any]:
    """Fields of one PIECE, without its key, that says several pieces as one."""
    logprobs = np.concatenate([piece.logprobs for piece in pieces])
    return [
        ids_to_bytes(np.concatenate([piece.token_ids for piece in pieces])),
        logprobs.astype("<f4", copy=False).tobytes(),
        ids_to_bytes(np.concatenate([piece.policy_version for piece in pieces])),
        ids_to_bytes(np.concatenate([piece.context_version for piece in pieces])),
        pieces[-1].length,
    ]


def generated_from_list(fields: Sequence[Any]) -> Generated:
    """The piece of the fields of a PIECE."""
    ids, logprobs, policy_version, context_version, length = fields
    return Generated(
        ids_from_bytes(ids),
        np.frombuffer(logprobs, "<f4").astype(np.float32, copy=False),
        ids_from_bytes(policy_version),
        ids_from_bytes(context_version),
        length=length,
    )


def spans_to_list(media: Sequence[MediumSpan]) -> list[list[Any]]:
    """Where images are."""
    return [[span.sha256, span.start, span.length] for span in media]


def spans_from_list(said: Sequence[Sequence[Any]]) -> tuple[MediumSpan, ...]:
    """Where images are; each checked."""
    return tuple(MediumSpan(*span) for span in said)


_ARRAYS = {
    "token_ids": "<i4",
    "sampled": "|b1",
    "trained": "|b1",
    "logprobs": "<f4",
    "policy_version": "<i4",
    "context_version": "<i4",
}


def segment_to_list(segment: Segment) -> list[Any]:
    """Fields of a SEGMENT, without its session."""
    arrays = [
        getattr(segment, name).astype(dtype, copy=False).tobytes()
        for name, dtype in _ARRAYS.items()
    ]
    return [segment.temperature, spans_to_list(segment.media), *arrays]


def segment_from_list(fields: Sequence[Any]) -> Segment:
    """The segment of the fields of a SEGMENT; checked."""
    temperature, media, *arrays = fields
    named = zip(_ARRAYS.items(), arrays, strict=True)
    return Segment(
        temperature=temperature,
        media=spans_from_list(media),
        **{
            name: np.frombuffer(raw, dtype).astype(np.dtype(dtype).newbyteorder("="), copy=False)
            for (name, dtype), raw in named
        },
    )


_SAMPLING = tuple(each.name for each in fields(Sampling))


def sampling_to_map(sampling: Sampling) -> dict[str, Any]:
    """How the policy is to sample."""
    return {name: getattr(sampling, name) for name in _SAMPLING}


def sampling_from_map(said: Mapping[str, Any]) -> Sampling:
    """How the policy is to sample."""
    return Sampling(**said)


def spec_to_map(spec: SessionSpec) -> dict[str, Any]:
    """What a session is opened with; the task as JSON, whose numbers know no bounds."""
    return asdict(replace(spec, task={})) | {"task": json.dumps(dict(spec.task))}


def spec_from_map(said: Mapping[str, Any]) -> SessionSpec:
    """What a session is opened with."""
    task, sampling = json.loads(said["task"]), sampling_from_map(said["sampling"])
    told: dict[str, Any] = {**said, "task": task, "sampling": sampling}
    return SessionSpec(**told)


def outcome_to_map(outcome: Outcome | None) -> dict[str, Any] | None:
    """How a client ended its session."""
    return None if outcome is None else asdict(outcome)


def outcome_from_map(said: Mapping[str, Any] | None) -> Outcome | None:
    """How a client ended its session."""
    if said is None:
        return None
    told: dict[str, Any] = {**said, "turn_rewards": tuple(said["turn_rewards"])}
    return Outcome(**told)


def error_to_list(error: TreadleError) -> list[Any]:
    """Fields of a FAILED, without its key."""
    return [error.kind.value, error.message, error.field, error.retry_after_s]


def error_from_list(fields: Sequence[Any]) -> PolicyError:
    """What FAILED says."""
    kind, message, field, retry_after_s = fields
    return PolicyError(Kind(kind), message, field, retry_after_s)
