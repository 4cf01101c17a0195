"""What the replica needs from the outside world; adapters/ provides it.

Shapes: P = tokens of a prompt.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_agents.chat_agent import ChatContext
from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import ImageRule, Shown
from treadle_agents.loop import Outcome
from treadle_agents.record import Generated
from treadle_core.episodes import FailureClass, Termination
from treadle_core.media import Medium, MediumSpan
from treadle_core.tickets import Json, Sampling, Ticket
from treadle_gateway import terms
from treadle_gateway.terms import Access, Captured, SessionSpec
from treadle_payloads.store import PayloadReference
from treadle_weights.layouts import Layout
from treadle_weights.transport import LoadOrder


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """Tokens in. A session's later requests extend what its earlier ones saw and sampled."""

    session: str
    """Requests of one session may share cached keys, until it is released."""
    token_ids: NDArray[np.int32]
    """The whole prompt, [P], P >= 1."""
    sampling: Sampling
    episode: str = ""
    """The episode that the session is an attempt at; empty for none."""
    media: tuple[MediumSpan, ...] = ()
    """Where images are in the prompt, ascending: each a run of the model's placeholder."""
    pictures: Mapping[str, Picture] = field(default_factory=dict[str, Picture])
    """These images by sha256, perhaps with others of the session."""


Heard = Callable[[Generated], None]
"""Told of a turn in pieces, in order, on the event loop of the call; neither raises nor blocks."""


class Engine(Protocol):
    """A policy that samples. Many requests run at once; weights change between two tokens."""

    @property
    def served_version(self) -> int:
        """Version installed now; 0 before the first install, and then nothing is generated."""
        ...

    @property
    def non_finite(self) -> int:
        """Calls that failed because a token had no finite log-probability, since the start."""
        ...

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and generation together."""
        ...

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        ...

    @property
    def samplings(self) -> frozenset[str]:
        """Optional fields of `Sampling` that it honours (`treadle_core.tickets.SHAPES`)."""
        ...

    @property
    def images(self) -> ImageRule | None:
        """How many tokens it takes an image for; None: it reads no images."""
        ...

    @property
    def layout(self) -> Layout:
        """Which rectangle of which tensor lies where in `arrival`."""
        ...

    @property
    def arrival(self) -> NDArray[np.uint8]:
        """Buffer that the next version's bytes are written into, [bytes]; decoding goes on."""
        ...

    async def generate(self, request: GenerationRequest, heard: Heard | None = None) -> Generated:
        """Samples one turn. Cancelling the call frees its place at the next token.

        `heard` is told what was sampled while it is: its pieces are together what is returned,
        only the last may have `length`, and all come before the call returns. A call that fails or
        is cancelled has been heard in part.

        Raises:
            InvalidFieldError: a field is outside its limits, or none that the engine honours.
            UnsupportedImageError: the prompt shows images, and the engine reads none.
            ContextOverflowError: the prompt leaves no room for a token.
            NonFiniteLogprobError: a sampled token has no finite log-probability.
        """
        ...

    def release(self, session: str) -> None:
        """Forgets what is cached for a session; unknown sessions are ignored."""
        ...

    async def install(self, version: int) -> None:
        """Makes the bytes in `arrival` the served version, wholly, between two tokens.

        Requests in flight go on under the new version; each token states its own.
        """
        ...

    async def alias(self, version: int) -> None:
        """Serves on under another number: the weights of `version` are those served, bit for bit.

        What is cached and what lies in `arrival` stay as they are; tokens state the new version
        from the next one on. Raises InvalidFieldError where nothing is served, or a newer version.
        """
        ...

    async def close(self) -> None:
        """Fails what runs and frees the engine."""
        ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """Names one attempt at an episode."""

    episode_id: str
    number: int
    """From 1."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What the ledger gave a replica to run."""

    tickets: tuple[Ticket, ...]
    lease_s: float
    """The lease of each ticket ends so many seconds after the call unless it is renewed."""
    complete: bool
    """No ticket will ever come."""


@dataclass(frozen=True, slots=True)
class Result:
    """What an episode did, beside its tokens."""

    reward: float | None
    termination: Termination
    num_tokens: int
    """Tokens over all segments."""
    num_trained: int
    """Those of them that enter the loss."""
    versions: tuple[int, ...]
    """Distinct policy and context versions of sampled tokens, ascending."""
    payload: PayloadReference
    """Of the episode's segments."""
    inline: bytes | None
    """The payload itself; None where it lies in the payload store."""
    media: tuple[Medium, ...] = ()
    """What the segments show, each content once, in the order in which it was first shown."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    turn_rewards: tuple[float, ...] = ()
    traceparent: str = ""
    """Of the attempt's root span."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an attempt came to nothing."""

    failure_class: FailureClass
    message: str
    traceparent: str = ""
    """Of the attempt's root span."""


class Experience(Protocol):
    """The ledger, as one replica sees it.

    Calls raise TreadleError with the reason that the ledger states. They are safe to repeat, but
    for `lease`: tickets of an answer that was lost expire and are issued again.
    """

    async def lease(
        self, *, served_version: int, max_tickets: int, slots: int, wait_s: float
    ) -> Lease:
        """Leases up to `max_tickets`; waits up to `wait_s` seconds for the first."""
        ...

    async def renew(
        self, attempts: Sequence[Attempt], *, served_version: int, timeout_s: float
    ) -> Sequence[Attempt]:
        """Renews the leases of running attempts; returns those that are to be stopped."""
        ...

    async def complete(self, attempt: Attempt, result: Result) -> None:
        """Records what an attempt did; durable when it returns."""
        ...

    async def fail(self, attempt: Attempt, failure: Failure) -> None:
        """Records that an attempt came to nothing; the ledger decides about a retry."""
        ...

    async def hand_back(self, attempts: Sequence[Attempt]) -> None:
        """Returns tickets unrun; no retry is charged."""
        ...


@dataclass(frozen=True, slots=True)
class Install:
    """Order to serve the verified version."""

    version: int
    trace_id: str
    """Trace of the step that it came from; may be empty."""


@dataclass(frozen=True, slots=True)
class Discard:
    """Order to forget a verified version."""

    version: int


@dataclass(frozen=True, slots=True)
class Alias:
    """Order to serve the same weights under another number."""

    version: int
    base: int
    """Version that the engine serves."""
    trace_id: str
    """Trace of the step that the version came from; may be empty."""


Order = LoadOrder | Install | Discard | Alias


@dataclass(frozen=True, slots=True)
class Membership:
    """All that refit has to know of an engine."""

    serving: int = 0
    """Version that it serves; 0 when none."""
    verified: int = 0
    """Version whose bytes it holds verified and not installed; 0 when none."""
    failed: int = 0
    """Version that it could not load; 0 when none."""
    failure: str = ""
    """Why."""
    draining: bool = False


class Refit(Protocol):
    """The fleet that an engine belongs to."""

    async def attend(self, member: Membership, layout: Layout, *, wait_s: float) -> Order | None:
        """Says what the engine is and is told what to do next; waits up to `wait_s` seconds.

        Safe to repeat: the same state gets the same order.
        """
        ...


@dataclass(frozen=True, slots=True)
class Job:
    """An episode for an agent."""

    task: Mapping[str, Json]
    max_context: int
    """Most tokens of the whole session."""
    max_turns: int
    deadline_s: float
    """Wall-clock seconds after which the episode has failed."""
    images: ImageRule | None = None
    """How many tokens the engine takes an image for; None: it reads none."""


class AgentsLostError(Exception):
    """An episode ended with the process of its agent, and not by a fault of its own."""


class Agents(Protocol):
    """Processes that agents run in."""

    @property
    def free(self) -> int:
        """Episodes that could start now."""
        ...

    async def play(self, job: Job, extend: Callable[[Shown], Awaitable[Generated]]) -> Outcome:
        """Plays one episode; `extend` shows the policy more and samples a turn.

        Cancelling the call ends the episode.

        Raises:
            EpisodeError: the episode failed, with whose fault it is.
            AgentsLostError: hand its ticket back.
            Exception: whatever `extend` raised.
        """
        ...

    async def converse(self, context: ChatContext) -> Outcome:
        """Plays one episode with an agent that talks to the policy by itself; raises as `play`."""
        ...


class Sessions(Protocol):
    """Where agents that talk by themselves find the policy; what they said is kept there.

    Calls raise SessionLostError where the record is lost: hand the ticket back.
    """

    @property
    def model_name(self) -> str:
        """The name that the policy answers to."""
        ...

    async def open(self, episode: str, spec: SessionSpec) -> Access:
        """Opens a session for an attempt at an episode. Raises DrainingError too."""
        ...

    async def offer(self, episode: str, spec: SessionSpec) -> Access:
        """Waits until a client from anywhere takes the episode, then opens its session.

        Cancelling the call withdraws the offer. Raises DrainingError too.
        """
        ...

    async def outcome(self, session: str) -> terms.Outcome:
        """Waits until the client ended its session, or its time is over."""
        ...

    async def end(self, session: str) -> Captured:
        """Ends a session and returns what it came to."""
        ...

    def close(self, session: str) -> None:
        """Ends a session that nothing is wanted of; one that has ended is ignored."""
        ...
