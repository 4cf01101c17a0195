"""What a claim holds, and whether it may be trained on."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from treadle_core.episodes import NO_VERSION, Episode, Segment, Termination
from treadle_core.errors import InvalidFieldError
from treadle_core.media import Medium
from treadle_payloads.store import PayloadReference


@dataclass(frozen=True, slots=True)
class ClaimedEpisode:
    """One recorded episode of a claimed task: all but its payload, unless that lies inline."""

    episode_id: str
    attempt: int
    reward: float | None
    termination: Termination
    num_tokens: int
    """Tokens over all segments."""
    num_trained: int
    """Those that enter the loss."""
    versions: tuple[int, ...]
    """Registered versions that sampled its tokens or their context, ascending."""
    oldest_step: int
    """Oldest step among those versions."""
    payload: PayloadReference
    inline: bytes | None = None
    """The payload itself; where absent it lies in the payload store."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    traceparent: str = ""
    """W3C traceparent of its root span; empty when it was not traced."""
    media: tuple[Medium, ...] = ()
    """What its segments show; read only by who asks for it."""


@dataclass(frozen=True, slots=True)
class ClaimedTask:
    """The episodes of one task, in recorded order."""

    task_id: str
    episodes: tuple[ClaimedEpisode, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim: a batch, "ask again" (no tasks), or the end."""

    tasks: tuple[ClaimedTask, ...] = ()
    complete: bool = False
    """No further step will come."""
    last: bool = False
    """The step is the run's last."""

    @property
    def episodes(self) -> tuple[ClaimedEpisode, ...]:
        """All members in recorded order."""
        return tuple(chain.from_iterable(task.episodes for task in self.tasks))

    @property
    def members_digest(self) -> str:
        """sha256 of the members' ids, attempts and payloads in order, 64 hex digits."""
        lines = (f"{e.episode_id} {e.attempt} {e.payload.sha256}\n" for e in self.episodes)
        return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ComingStep:
    """What a claim will probably hold."""

    claim: Claim
    """Of an inline payload the bytes are left out."""
    ready: bool
    """Every member is there."""


def checked_episode(
    claimed: ClaimedEpisode, segments: tuple[Segment, ...], *, vocab_size: int, max_tokens: int
) -> Episode:
    """The episode that a claim and its payload make together.

    Raises InvalidFieldError, its field led by the episode's id, where they contradict each other
    (in what the segments show, too),
    a token is not in the vocabulary, a segment to be trained is longer than `max_tokens`, or a
    token's version is not one that the ledger vouched for.
    """
    highest = max(int(segment.token_ids.max()) for segment in segments)
    if highest >= vocab_size:
        raise _invalid(claimed, "token_ids", f"< {vocab_size}", highest)
    # A segment that shows media is left out of the loss (`step.weigh`), however long it is.
    longest = max(
        segment.num_tokens if segment.num_trained and not segment.media else 0
        for segment in segments
    )
    if longest > max_tokens:
        raise _invalid(claimed, "tokens", f"<= {max_tokens} in a segment", longest)
    num_tokens = sum(segment.num_tokens for segment in segments)
    if num_tokens != claimed.num_tokens:
        raise _invalid(claimed, "num_tokens", claimed.num_tokens, num_tokens)
    num_trained = sum(segment.num_trained for segment in segments)
    if num_trained != claimed.num_trained:
        raise _invalid(claimed, "num_trained", claimed.num_trained, num_trained)
    unknown = _versions(segments) - set(claimed.versions)
    if unknown:
        raise _invalid(claimed, "versions", list(claimed.versions), sorted(unknown))
    try:
        return Episode(
            segments, claimed.reward, claimed.termination, claimed.metrics, media=claimed.media
        )
    except InvalidFieldError as error:
        raise _invalid(claimed, error.field, error.limit, error.value) from error


def _versions(segments: tuple[Segment, ...]) -> set[int]:
    found: set[int] = set()
    for segment in segments:
        for versions in (segment.policy_version, segment.context_version):
            found.update(versions[np.diff(versions, prepend=NO_VERSION) != 0].tolist())
    return found - {NO_VERSION}


def _invalid(claimed: ClaimedEpisode, name: str, limit: object, value: object) -> InvalidFieldError:
    return InvalidFieldError(f"{claimed.episode_id}.{name}", limit=limit, value=value)
