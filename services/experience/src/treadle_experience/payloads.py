"""Payloads of results: whether they are whole and what the result says, and their bytes."""

from collections.abc import Iterable, Mapping

from treadle.episode.v1 import episode_pb2
from treadle_core.episodes import NO_VERSION, Segment
from treadle_core.errors import InvalidFieldError, PayloadMissingError
from treadle_core.media import check_media
from treadle_experience.core.state import Result
from treadle_payloads import media
from treadle_payloads.codec import decode_payload
from treadle_payloads.store import INLINE_LIMIT, Buffer, PayloadReference, PayloadStore

CLAIM_BYTES = 32 * 1024 * 1024
"""Most bytes of payloads that the answer to one claim carries; a message has 64 MiB."""


def inline_limit(episodes_per_step: int) -> int:
    """Bytes up to which a payload stays in the ledger, so that a whole batch fits an answer."""
    return min(INLINE_LIMIT, CLAIM_BYTES // episodes_per_step)


def reference_of(result: Result) -> PayloadReference:
    """Names the payload of a result, and where it lies."""
    return PayloadReference(result.sha256, result.size, result.node, result.node_epoch)


def stored_references(result: Result) -> Mapping[str, PayloadReference]:
    """What the payload store holds of a result, by the field that names it."""
    named = {} if result.inlined else {"result.payload.sha256": reference_of(result)}
    return named | {
        f"result.media[{index}].sha256": media.reference_of(medium)
        for index, medium in enumerate(result.media)
    }


def checked_inline(payload: episode_pb2.Payload, result: Result) -> bytes:
    """The bytes that came with a result. Raises InvalidFieldError or PayloadCorruptError."""
    data = payload.inline
    if len(data) > INLINE_LIMIT:
        raise InvalidFieldError(
            "result.payload.inline", limit=f"at most {INLINE_LIMIT} bytes", value=len(data)
        )
    reference_of(result).check(data)
    _check_content(data, result)
    return data


def load(result: Result, inline: bytes | None, store: PayloadStore | None) -> Buffer:
    """The bytes of a recorded result's payload: `inline` as the ledger has them, or in `store`.

    Raises PayloadMissingError where neither has them, or PayloadCorruptError.
    """
    reference = reference_of(result)
    if not result.inlined and store is not None:
        return store.get(reference)
    if not result.inlined or inline is None:
        place = "ledger" if result.inlined else "run, which has no payload store"
        raise PayloadMissingError(
            f"payload {result.sha256} is not in the {place}", field="sha256", value=result.sha256
        )
    reference.check(inline)
    return inline


def _check_content(data: bytes, result: Result) -> None:
    segments = decode_payload(data)
    try:
        check_media(result.media, [segment.media for segment in segments])
    except InvalidFieldError as error:
        field = error.field if error.field.startswith("segments") else f"result.{error.field}"
        raise InvalidFieldError(field, limit=error.limit, value=error.value) from error
    found = {
        "num_tokens": sum(segment.num_tokens for segment in segments),
        "num_trained": sum(segment.num_trained for segment in segments),
        "versions": _versions(segments),
    }
    for name, value in found.items():
        if getattr(result, name) != value:
            raise InvalidFieldError(
                f"result.{name}", limit=f"{value} as in the payload", value=getattr(result, name)
            )


def _versions(segments: Iterable[Segment]) -> tuple[int, ...]:
    found: set[int] = set()
    for segment in segments:
        found.update(segment.policy_version.tolist(), segment.context_version.tolist())
    return tuple(sorted(found - {NO_VERSION}))
