"""The terms of a session: what it is opened with, and what comes of it; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from treadle_agents.images.picture import Picture
from treadle_core.episodes import Episode, Segment, Termination
from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_core.media import MAX_MEDIA
from treadle_core.tickets import Json, Sampling


class SessionLostError(TreadleError):
    """The worker of a session ended, and with it what was said; its ticket is to be handed back."""

    kind = Kind.UNAVAILABLE
    reason = "SESSION_LOST"

    def __init__(self, session: str) -> None:
        super().__init__(
            f"session {session} went down with its worker", field="session", value=session
        )


class UnknownSessionError(TreadleError):
    """No session of that name is open."""

    kind = Kind.NOT_FOUND
    reason = "UNKNOWN_SESSION"

    def __init__(self, session: str) -> None:
        super().__init__(f"no session {session} is open", field="session", value=session)


class DrainingError(TreadleError):
    """No new session is opened any more."""

    kind = Kind.UNAVAILABLE
    reason = "DRAINING"

    def __init__(self) -> None:
        super().__init__("the gateway drains: no new sessions", retry_after_s=5.0)


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a session is opened with."""

    sampling: Sampling
    """The recipe's; its `max_tokens` bounds every reply."""
    deadline_s: float
    """Seconds after which the session is over, whatever its client does."""
    trainable: bool = True
    task: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Given to a client that took the episode by `POST /sessions`."""
    max_requests: int = 512
    """Over the whole session."""
    max_concurrent: int = 32
    """Requests that run at once."""
    max_sampled: int = 10_000_000
    """Tokens that the policy samples, over the whole session."""
    max_images: int = MAX_MEDIA
    """Images, each content once, over the whole session."""
    max_image_bytes: int = 128 * 1024 * 1024
    """Of all of them."""


@dataclass(frozen=True, slots=True)
class Access:
    """What an agent needs in order to talk."""

    session: str
    token: str = field(repr=False)
    """Bearer token or API key: 256 random bits, good until the session ends."""
    urls: Mapping[str, str]
    """Base URLs by client: `openai` ends with `/v1`, `anthropic` does not; `end` is where the
    client ends the session. All name the session."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a client ended its session. Construction checks the numbers."""

    reward: float | None = None
    """Absent is not zero."""
    turn_rewards: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    truncated: bool = False
    no_reward: str = ""
    """Why there is no reward, where the client says so."""
    expired: bool = False
    """Nobody ended it: its time was over."""

    def __post_init__(self) -> None:
        """Raises InvalidFieldError where a number is none, or both a reward and none are stated."""
        Episode((), self.reward, Termination.FINISHED, self.metrics, self.turn_rewards)
        if self.no_reward and (self.reward is not None or self.turn_rewards):
            raise InvalidFieldError("no_reward", limit="no reward beside it", value=self.reward)


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """All that a session came to."""

    segments: tuple[Segment, ...]
    """One for each leaf of what was said, in the order of their creation."""
    counts: Mapping[str, float]
    outcome: Outcome | None
    """None where the client did not end the session."""
    pictures: tuple[Picture, ...] = ()
    """Images that came, each content once; the segments show these, or some of them."""
