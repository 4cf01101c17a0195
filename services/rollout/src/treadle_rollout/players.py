"""Who plays an episode: an environment turn by turn, an agent that talks by itself, or a stranger.

What is common to all: a ticket goes in; what the policy said and what it was worth come out.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from treadle_agents.chat_agent import ChatContext
from treadle_agents.failures import EpisodeError
from treadle_agents.images.picture import Picture
from treadle_agents.images.placeholders import Shown
from treadle_agents.loop import Outcome
from treadle_agents.record import Generated, Recorder
from treadle_core.episodes import FailureClass, Segment, Termination
from treadle_core.media import MAX_MEDIA, Medium
from treadle_core.tickets import Sampling, Ticket
from treadle_gateway.terms import (
    Access,
    Captured,
    DrainingError,
    SessionLostError,
    SessionSpec,
)
from treadle_rollout.core.sessions import joined
from treadle_rollout.ports import (
    Agents,
    AgentsLostError,
    Engine,
    GenerationRequest,
    Job,
    Sessions,
)
from treadle_runtime import telemetry


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """What an episode came to."""

    segments: tuple[Segment, ...]
    outcome: Outcome
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    """What happened in its session, by name; empty where it had none."""
    media: Mapping[Medium, bytes] = field(default_factory=dict[Medium, bytes])
    """The bytes of what the segments show; others may be among them."""


log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Player(Protocol):
    """Plays tickets."""

    @property
    def free(self) -> int:
        """Episodes that could start now."""
        ...

    async def play(self, ticket: Ticket) -> Played:
        """Cancelling the call ends the episode.

        Raises:
            EpisodeError: the episode failed, with whose fault it is.
            AgentsLostError: hand its ticket back.
            TreadleError: what the engine raised.
        """
        ...


@dataclass(frozen=True, slots=True)
class Worth:
    """What failures of the policy are worth."""

    failure_reward: float | None = None
    """Of an episode that the policy failed; None: it is a failed attempt like others."""

    def of(self, error: EpisodeError) -> Outcome:
        """Raises the error where it is worth nothing."""
        if self.failure_reward is None or error.failure_class is not FailureClass.POLICY:
            raise error
        return Outcome(self.failure_reward, Termination.FAILED, {}, ())


@dataclass(frozen=True, slots=True)
class EnvPlayer:
    """Agents of which we own the loop."""

    engine: Engine
    agents: Agents
    max_turns: int
    worth: Worth
    on_tokens: Callable[[int], None]
    """Told of every turn how many tokens it sampled."""

    @property
    def free(self) -> int:
        """Episodes that could start now."""
        return self.agents.free

    async def play(self, ticket: Ticket) -> Played:
        """As Player.play."""
        session = f"{ticket.episode_id}-{ticket.attempt}"
        generate = partial(self._generate, ticket.episode_id, session)
        recorder = Recorder(generate, ticket.sampling, self.engine.max_context)
        job = Job(
            task=ticket.spec,
            max_context=self.engine.max_context,
            max_turns=self.max_turns,
            deadline_s=ticket.deadline_s,
            images=self.engine.images,
        )
        try:
            try:
                outcome = await self.agents.play(job, recorder.extend)
            except EpisodeError as error:
                outcome = self.worth.of(error)
            segments = recorder.segments(trainable=not ticket.evaluation)
            return Played(segments, outcome, media=_media(recorder.pictures))
        finally:
            self.engine.release(session)

    async def _generate(
        self, episode: str, session: str, prompt: Shown, sampling: Sampling
    ) -> Generated:
        request = GenerationRequest(
            session, prompt.token_ids, sampling, episode, prompt.media, prompt.pictures
        )
        with telemetry.tracer().start_as_current_span("turn") as span:
            made = await self.engine.generate(request)
            span.set_attribute("treadle.version", int(made.policy_version.max(initial=0)))
        self.on_tokens(made.token_ids.size)
        return made


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """Bounds of a session, beside those of its ticket."""

    max_requests: int = 512
    max_concurrent: int = 32
    """Requests that run at once."""
    max_sampled: int = 10_000_000
    """Tokens that the policy samples, over the whole session."""
    max_images: int = MAX_MEDIA
    """Images that it is shown, each content once."""
    max_image_bytes: int = 128 * 1024 * 1024
    """Of these together."""

    def of(self, ticket: Ticket) -> SessionSpec:
        """What the session of a ticket is opened with."""
        return SessionSpec(
            sampling=ticket.sampling,
            deadline_s=ticket.deadline_s,
            trainable=not ticket.evaluation,
            task=ticket.spec,
            max_requests=self.max_requests,
            max_concurrent=self.max_concurrent,
            max_sampled=self.max_sampled,
            max_images=self.max_images,
            max_image_bytes=self.max_image_bytes,
        )


@dataclass(frozen=True, slots=True)
class ChatPlayer:
    """Agents that own their loop, in our workers."""

    agents: Agents
    sessions: Sessions
    terms: SessionTerms
    worth: Worth
    max_context: int

    @property
    def free(self) -> int:
        """Episodes that could start now."""
        return self.agents.free

    async def play(self, ticket: Ticket) -> Played:
        """As Player.play."""
        access = await _found(self.sessions.open(ticket.episode_id, self.terms.of(ticket)))
        try:
            try:
                outcome = await self._converse(ticket, access)
            except EpisodeError as error:
                # What the agent could not do may be the fault of a gateway that went down.
                captured = await _found(self.sessions.end(access.session))
                outcome = self.worth.of(error)
            else:
                captured = await _found(self.sessions.end(access.session))
        finally:
            self.sessions.close(access.session)
        return _played(captured, outcome)

    async def _converse(self, ticket: Ticket, access: Access) -> Outcome:
        """Ends the agent where the session is lost: whatever it did could not be trained on."""
        playing = asyncio.ensure_future(self.agents.converse(self._context(ticket, access)))
        lost = asyncio.ensure_future(self._lost(access.session))
        try:
            await asyncio.wait({playing, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise AgentsLostError(f"session {access.session} is lost")
            return await playing
        finally:
            for task in (lost, playing):
                task.cancel()
            await asyncio.wait({lost, playing})

    async def _lost(self, session: str) -> None:
        """Returns when a session is lost, and only then."""
        try:
            await self.sessions.outcome(session)
        except SessionLostError:
            return
        await asyncio.Event().wait()

    def _context(self, ticket: Ticket, access: Access) -> ChatContext:
        return ChatContext(
            task=ticket.spec,
            base_url=access.urls["openai"],
            anthropic_url=access.urls["anthropic"],
            api_key=access.token,
            model=self.sessions.model_name,
            sampling=ticket.sampling,
            max_context=self.max_context,
            deadline_s=ticket.deadline_s,
        )


@dataclass(frozen=True, slots=True)
class ExternalPlayer:
    """Clients from anywhere, who take an episode and report what it was worth."""

    sessions: Sessions
    terms: SessionTerms
    slots: int
    """Episodes that are offered at once; the ticket loop counts those that hold one."""

    @property
    def free(self) -> int:
        """Episodes that could start now."""
        return self.slots

    async def play(self, ticket: Ticket) -> Played:
        """As Player.play."""
        try:
            async with asyncio.timeout(ticket.deadline_s):
                access = await _found(self.sessions.offer(ticket.episode_id, self.terms.of(ticket)))
        except TimeoutError:
            message = f"nobody took the episode within {ticket.deadline_s:g} s"
            raise EpisodeError(FailureClass.INFRASTRUCTURE, message) from None
        try:
            ended = await _found(self.sessions.outcome(access.session))
            captured = await _found(self.sessions.end(access.session))
        finally:
            self.sessions.close(access.session)
        if ended.expired:
            message = f"its client did not end the session within {ticket.deadline_s:g} s"
            raise EpisodeError(FailureClass.ENVIRONMENT, message)
        return _played(captured, None)


async def _found(call: "Awaitable[_T]") -> "_T":
    """Awaits what a session is asked; raises AgentsLostError where it is gone."""
    try:
        return await call
    except (SessionLostError, DrainingError) as error:
        raise AgentsLostError(error.message) from error


def _played(captured: Captured, outcome: Outcome | None) -> Played:
    whole = joined(outcome, captured.outcome)
    counts = dict(captured.counts)
    if whole.reward is None:
        counts["no_reward"] = 1
        reason = captured.outcome.no_reward if captured.outcome else ""
        log.info("a session ended without a reward: %s", reason or "nobody gave one")
    return Played(captured.segments, whole, counts, _media(captured.pictures))


def _media(pictures: Iterable[Picture]) -> dict[Medium, bytes]:
    return {each.medium: each.data for each in pictures}
