"""One attempt at an episode: from its ticket to an end that the ledger knows."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from opentelemetry.context import Context

from treadle_agents.failures import EpisodeError
from treadle_agents.loop import Outcome
from treadle_core.episodes import FailureClass, Segment
from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_core.media import Medium
from treadle_core.tickets import Ticket
from treadle_payloads.codec import encode_payload
from treadle_payloads.media import put_medium
from treadle_payloads.store import INLINE_LIMIT, PayloadStore
from treadle_rollout.core.results import Verdict, result_of, shown, verdict
from treadle_rollout.players import Played, Player
from treadle_rollout.ports import AgentsLostError, Attempt, Experience, Failure, Result
from treadle_runtime import telemetry
from treadle_runtime.failpoints import failpoint

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 2.0


@dataclass(frozen=True, slots=True)
class AttemptSettings:
    """How attempts are run."""

    run_id: str
    delivery_s: float = 300.0
    """Seconds for which a report is repeated while the ledger does not take it."""
    inline_bytes: int = INLINE_LIMIT
    """Payloads of up to so many bytes are reported with their result."""


@dataclass(frozen=True, slots=True)
class AttemptRunner:
    """Has a ticket played, and reports what came of it."""

    settings: AttemptSettings
    experience: Experience
    player: Player
    payloads: PayloadStore
    on_completed: Callable[[Ticket, tuple[Segment, ...], Outcome], None] | None = None
    """Told of every episode whose result the ledger took."""
    on_failed: Callable[[Attempt, Failure], None] | None = None
    """Told of every failure that the ledger took."""
    on_counts: Callable[[Mapping[str, float]], None] | None = None
    """Told of every episode that had a session what happened there."""

    async def run(self, ticket: Ticket) -> str:
        """Returns how the attempt ended, in a word. Cancelling it reports nothing.

        Raises TreadleError when the ledger is another run's, or the engine is broken.
        """
        attempt = Attempt(ticket.episode_id, ticket.attempt)
        with telemetry.tracer().start_as_current_span(
            "episode",
            context=Context(),  # a root, whatever leased the ticket
            attributes={
                "treadle.run": self.settings.run_id,
                "treadle.episode": ticket.episode_id,
                "treadle.attempt": ticket.attempt,
            },
        ) as span:
            traceparent = telemetry.traceparent(span)
            try:
                played, media = await self._play(ticket)
            except AgentsLostError as error:
                log.info("episode %s is handed back: %s", ticket.episode_id, error)
                handed = await self._deliver(partial(self.experience.hand_back, [attempt]))
                return "handed_back" if handed is None else "dropped"
            except EpisodeError as error:
                failure = Failure(error.failure_class, error.message, traceparent)
                return await self._fail(attempt, failure)
            ended = await self._complete(attempt, played, media, traceparent)
        if ended == "completed" and self.on_completed:
            self.on_completed(ticket, played.segments, played.outcome)
        return ended

    async def _play(self, ticket: Ticket) -> tuple[Played, Mapping[Medium, bytes]]:
        """What came of it, and what its segments show. Raises EpisodeError or AgentsLostError."""
        try:
            played = await self.player.play(ticket)
        except TreadleError as error:
            if error.kind is Kind.BROKEN:
                raise
            message = f"engine: {error.reason}: {error.message}"
            raise EpisodeError(FailureClass.INFRASTRUCTURE, message) from error
        if self.on_counts and played.counts:
            self.on_counts(played.counts)
        if not played.segments:
            message = "the agent ended the episode before the policy said anything"
            raise EpisodeError(FailureClass.ENVIRONMENT, message)
        try:
            return played, shown(played.segments, played.media)
        except InvalidFieldError as error:
            message = f"the bytes of what the policy was shown are not there: {error.message}"
            raise EpisodeError(FailureClass.INFRASTRUCTURE, message) from error

    async def _complete(
        self, attempt: Attempt, played: Played, media: Mapping[Medium, bytes], traceparent: str
    ) -> str:
        data = encode_payload(played.segments)
        result = result_of(
            played.segments,
            played.outcome,
            data=data,
            traceparent=traceparent,
            media=media,
            inline_bytes=self.settings.inline_bytes,
        )

        async def complete() -> None:
            failpoint("rollout.complete.before_payload")
            report = result
            if result.inline is None or media:
                report = await asyncio.to_thread(self._stored, attempt, result, data, media)
            failpoint("rollout.complete.before_report")
            await self.experience.complete(attempt, report)
            failpoint("rollout.complete.after_report")

        refused = await self._deliver(complete)
        if refused is None:
            return "completed"
        if verdict(refused) is not Verdict.REFUSED:
            return "dropped"
        message = f"the ledger refused the result: {refused.reason}: {refused.message}"
        failure = Failure(FailureClass.INFRASTRUCTURE, message, traceparent)
        return await self._fail(attempt, failure)

    def _stored(
        self, attempt: Attempt, result: Result, data: bytes, media: Mapping[Medium, bytes]
    ) -> Result:
        """Puts what does not travel with the report, media first; says where it lies. Blocks."""
        put = partial(put_medium, store=self.payloads, holder=attempt.episode_id)
        result = replace(result, media=tuple(put(medium, each) for medium, each in media.items()))
        if result.inline is not None:
            return result
        return replace(result, payload=self.payloads.put(data, holder=attempt.episode_id))

    async def _fail(self, attempt: Attempt, failure: Failure) -> str:
        log.info("episode %s failed: %s", attempt.episode_id, failure.message)
        refused = await self._deliver(partial(self.experience.fail, attempt, failure))
        if refused is None and self.on_failed:
            self.on_failed(attempt, failure)
        return f"failed_{failure.failure_class}" if refused is None else "dropped"

    async def _deliver(self, report: Callable[[], Awaitable[None]]) -> TreadleError | None:
        """Repeats a report until the ledger took it; returns why it did not.

        Raises TreadleError when the ledger is another run's.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self.settings.delivery_s
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                await report()
            except TreadleError as error:
                decided = verdict(error)
                if decided is Verdict.END:
                    raise
                if error.kind is Kind.EXHAUSTED:  # a full disk is waited for, however long
                    if delay_s == _FIRST_DELAY_S:
                        log.warning("a report waits for room: %s: %s", error.reason, error.message)
                    give_up = loop.time() + self.settings.delivery_s
                if decided is not Verdict.RETRY or loop.time() + delay_s > give_up:
                    log.warning("a report was not taken: %s: %s", error.reason, error.message)
                    return error
            else:
                return None
            await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))  # noqa: S311, jitter
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
