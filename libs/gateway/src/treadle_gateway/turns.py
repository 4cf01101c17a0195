"""From a request to what is sampled for it: where it goes on from, its tokens, its generation."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from treadle_agents.images.placeholders import Shown
from treadle_gateway.capture.session import Place
from treadle_gateway.capture.turns import Turn
from treadle_gateway.conversation import Ask
from treadle_gateway.errors import RefusedError
from treadle_gateway.live import Live
from treadle_gateway.ports import Asked, Policy
from treadle_gateway.questions import Question
from treadle_gateway.sampling import SamplingRule
from treadle_gateway.sessions import Session

WHOLE_APART_S = 0.5
"""Least seconds between two pieces of a reply that its client gets whole."""
STREAM_APART_S = 0.02
"""Likewise of one that is streamed: no reader sees the difference, and a piece costs a wake-up."""

T = TypeVar("T")


@dataclass(slots=True)
class Turns:
    """Has the policy answer questions of any session. What takes long runs in threads."""

    policy: Policy
    rule: SamplingRule
    _threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, "markup"), init=False
    )

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Runs what would hold the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    async def live(self, session: Session, question: Question) -> Live:
        """The generation that answers: a new one, or one that is under way or undelivered.

        Raises RefusedError.
        """
        async with session.lock:  # else two identical requests would both find nothing to join
            session.check()
            place = session.capture.locate(question.ask)
            if place.turn is not None:
                return session.live_of(place.turn)
            place = question.stand(place)
            render = partial(question.render, place)
            shown = render() if question.is_light(place) else await self.in_thread(render)
            session.check()
            return self._begin(session, question, place, shown)

    def _begin(self, session: Session, question: Question, place: Place, shown: Shown) -> Live:
        limit = self.policy.max_context
        tokens = place.tokens + shown.token_ids.size
        if tokens >= limit:
            message = f"prompt is too long: {tokens} tokens > {limit - 1} maximum"
            raise RefusedError("overflow", message, tokens=tokens, limit=limit)
        room = min(limit - tokens, session.room)
        settled = self.rule.settle(
            question.ask, session.spec.sampling, room=room, grammar=question.grammar()
        )
        for name in settled.other:
            session.counts[f"other_sampling.{name}"] += 1
        for name in question.ask.ignored:
            session.counts[f"ignored.{name}"] += 1
        turn = session.capture.begin(
            place,
            shown.token_ids,
            sampling=settled.sampling,
            trained=settled.trained,
            now=time.monotonic(),
            media=shown.media,
        )
        question.begun(turn)
        live = Live(
            turn=turn,
            reading=question.reading(),
            policy=self.policy,
            asked=_asked(session, turn, question.ask),
            created=int(time.time()),
            stops=bool(question.ask.wanted.stop),
            on_sampled=session.add_sampled,
            on_failed=session.forget,
        )
        session.keep(live)
        live.start()
        session.asked = turn
        return live


def _asked(session: Session, turn: Turn, ask: Ask) -> Asked:
    """The prompt of a turn, but for what stands since the prompt before."""
    stands = turn.stands(session.asked)
    return Asked(
        session.id,
        stands,
        turn.prompt_from(stands),
        turn.sampling,
        apart_s=_apart_s(ask),
        media=turn.prompt_media,
    )


def _apart_s(ask: Ask) -> float:
    """How seldom pieces may come: a stop text ends the sampling where it is read."""
    if ask.wanted.stop:
        return 0.0
    return STREAM_APART_S if ask.stream else WHOLE_APART_S
