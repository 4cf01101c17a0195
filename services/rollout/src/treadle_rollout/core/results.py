"""What is reported of an attempt, and what a refusal of the report means."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import numpy as np

from treadle_agents.loop import Outcome
from treadle_core.episodes import Segment
from treadle_core.errors import Kind, TreadleError
from treadle_core.media import Medium, check_media
from treadle_payloads.store import INLINE_LIMIT, PayloadReference
from treadle_rollout.ports import Result


class Verdict(StrEnum):
    """What to do about a report that the ledger did not take."""

    RETRY = "retry"
    """It may take the same report later."""
    DROP = "drop"
    """It does not want it, and is right: the attempt no longer counts."""
    REFUSED = "refused"
    """It will never take this report; the attempt has failed."""
    END = "end"
    """This process works for another run, or the ledger is not what it was."""


_DROPPED = {"STALE_ATTEMPT", "UNKNOWN_EPISODE", "RESULT_CONFLICT"}
_AGAIN = {"WRITER_FENCED", "PAYLOAD_KEEPER_FENCED", "PAYLOAD_MISSING"}
"""A fenced writer has a successor; a report puts a payload that is missing again."""
_LATER = {Kind.UNAVAILABLE, Kind.EXHAUSTED, Kind.CORRUPT, Kind.BROKEN}


def verdict(error: TreadleError) -> Verdict:
    """Reads a refusal. Corrupt bytes are sent again."""
    if error.reason == "WRONG_RUN":
        return Verdict.END
    if error.reason in _DROPPED:
        return Verdict.DROP
    if error.kind in _LATER or error.reason in _AGAIN:
        return Verdict.RETRY
    return Verdict.REFUSED


def result_of(
    segments: Sequence[Segment],
    outcome: Outcome,
    *,
    data: bytes,
    traceparent: str,
    media: Iterable[Medium] = (),
    inline_bytes: int = INLINE_LIMIT,
) -> Result:
    """The report of an episode whose segments are serialised as `data` and show `media`.

    The bytes travel inside it when they are at most `inline_bytes`.
    """
    return Result(
        reward=outcome.reward,
        termination=outcome.termination,
        metrics=outcome.metrics,
        turn_rewards=outcome.turn_rewards,
        num_tokens=sum(segment.num_tokens for segment in segments),
        num_trained=sum(segment.num_trained for segment in segments),
        versions=versions_of(segments),
        traceparent=traceparent,
        payload=PayloadReference.of(data),
        inline=data if len(data) <= inline_bytes else None,
        media=tuple(media),
    )


def shown(segments: Sequence[Segment], media: Mapping[Medium, bytes]) -> dict[Medium, bytes]:
    """Of `media` those that the segments show, in the order in which they first do.

    Raises InvalidFieldError where one is not there, or they are too many.
    """
    by_key = {medium.sha256: medium for medium in media}
    spans = [segment.media for segment in segments]
    keys = dict.fromkeys(span.sha256 for each in spans for span in each)
    found = [by_key[key] for key in keys if key in by_key]
    check_media(found, spans)
    return {medium: media[medium] for medium in found}


def versions_of(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Distinct policy and context versions of all sampled tokens, ascending."""
    found: set[int] = set()
    for segment in segments:
        for versions in (segment.policy_version, segment.context_version):
            found.update(np.unique(versions[segment.sampled]).tolist())
    return tuple(sorted(found))
