"""Payloads of results: taken in once they are whole and what the result says, and read back."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from treadle.episode.v1 import episode_pb2
from treadle_core.episodes import NO_VERSION, Segment
from treadle_core.errors import InvalidFieldError, PayloadMissingError
from treadle_experience.core.state import Result
from treadle_payloads.codec import decode_payload
from treadle_payloads.store import INLINE_LIMIT, PayloadReference, PayloadStore

CLAIM_BYTES = 32 * 1024 * 1024
"""Most bytes of payloads that the answer to one claim carries; a message has 64 MiB."""


def inline_limit(episodes_per_step: int) -> int:
    """Bytes up to which a payload stays in the ledger, so that a whole batch fits an answer."""
    return min(INLINE_LIMIT, CLAIM_BYTES // episodes_per_step)


async def accept(
    payload: episode_pb2.Payload, result: Result, store: PayloadStore, *, limit: int
) -> tuple[Result, bytes | None]:
    """Checks a payload, and moves an inline one of more than `limit` bytes to `store`.

    Returns the result, which says where the payload is now, and the bytes if they stay inline.

    Raises InvalidFieldError, PayloadCorruptError, or PayloadMissingError where the store does not
    hold that many bytes under the sha256.
    """
    reference = PayloadReference(result.sha256, result.size)
    if result.inlined:
        data = payload.inline
        if len(data) > INLINE_LIMIT:
            raise InvalidFieldError(
                "result.payload.inline", limit=f"at most {INLINE_LIMIT} bytes", value=len(data)
            )
        reference.check(data)
        _check_content(data, result)
        if len(data) <= limit:
            return result, data
        await asyncio.to_thread(store.put, data)
    # Nothing is awaited between this look and the decision, so no release comes between them.
    if not store.has(reference):
        raise PayloadMissingError(
            f"payload {reference.sha256} of {reference.size} bytes is not in the store",
            field="result.payload.sha256",
            limit=f"{reference.size} bytes in the store",
            value=reference.sha256,
        )
    return replace(result, inlined=False), None


def load(result: Result, inline: bytes | None, store: PayloadStore | None) -> bytes:
    """The bytes of a recorded result's payload: `inline` as the ledger has them, or in `store`.

    Raises PayloadMissingError where neither has them, or PayloadCorruptError.
    """
    reference = PayloadReference(result.sha256, result.size)
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
