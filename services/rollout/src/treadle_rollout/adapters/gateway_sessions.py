"""Sessions on the gateway's workers, in front of the replica's engine."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from opentelemetry.context import Context, get_current

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_gateway.pool import GatewayPool
from treadle_gateway.ports import Prompt
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.terms import (
    Access,
    Captured,
    DrainingError,
    Outcome,
    SessionLostError,
    SessionSpec,
    UnknownSessionError,
)
from treadle_rollout.core.errors import SessionEndedError
from treadle_rollout.ports import Engine, GenerationRequest, Heard
from treadle_runtime import telemetry

_REMEMBERED = 4096
"""Ended sessions of which it is known how they ended, so that ending them again is answered."""


@dataclass(slots=True, eq=False)
class _Open:
    """A session that is open."""

    episode: str
    context: Context
    """Of the attempt's span, for those of its turns."""
    access: Access
    spec: SessionSpec
    outcome: "asyncio.Future[Outcome]"
    """What was reported here, and not over HTTP."""


@dataclass(slots=True, eq=False)
class _Offered:
    """An episode that waits for a client, here as well as at the gateway's workers."""

    episode: str
    context: Context
    spec: SessionSpec
    at_workers: "asyncio.Task[Access]"
    taken: "asyncio.Future[Access]"


@dataclass(slots=True)
class GatewaySessions:
    """As Sessions; `start` it, then `run` it beside the episodes."""

    settings: GatewaySettings
    workers: int
    engine: Engine
    on_tokens: Callable[[int], None]
    """Told how many tokens each piece of a turn has."""
    _pool: GatewayPool = field(init=False)
    _open: dict[str, _Open] = field(default_factory=dict[str, _Open], init=False)
    _offers: "deque[_Offered]" = field(default_factory=deque["_Offered"], init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _requests: dict[str, str] = field(default_factory=dict[str, str], init=False)
    """Session by the request that opened it."""
    _ended: "OrderedDict[str, Outcome]" = field(
        default_factory=OrderedDict[str, Outcome], init=False
    )
    _closing: "set[asyncio.Task[None]]" = field(
        default_factory=set["asyncio.Task[None]"], init=False
    )
    _draining: bool = field(default=False, init=False)
    _broken: "asyncio.Event" = field(default_factory=asyncio.Event, init=False)
    _cause: TreadleError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Makes the pool; nothing is started."""
        self._pool = GatewayPool(self.settings, self.workers, self.generate)

    @property
    def model_name(self) -> str:
        """The name that the policy answers to."""
        return self.settings.model_name

    @property
    def restarts(self) -> int:
        """Workers that ended and were started again."""
        return self._pool.restarts

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the workers are."""
        return self._pool.urls

    async def start(self) -> None:
        """Starts every worker. Raises WorkerStartError where one cannot serve."""
        await self._pool.start()

    async def run(self) -> None:
        """Keeps the workers; runs until cancelled. Raises TreadleError when the engine broke."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pool.run())
            await self._broken.wait()
            if self._cause is not None:
                raise self._cause

    async def aclose(self) -> None:
        """Stops all workers; sessions that are open are lost."""
        await self._pool.close()

    def drain(self) -> None:
        """Opens no session any more; those that are open go on."""
        self._draining = True
        self._news.set()
        self._pool.drain()

    async def open(self, episode: str, spec: SessionSpec) -> Access:
        """As Sessions.open."""
        return self._note(episode, get_current(), spec, await self._pool.open(spec))

    async def offer(self, episode: str, spec: SessionSpec) -> Access:
        """As Sessions.offer."""
        offered = _Offered(
            episode,
            get_current(),
            spec,
            asyncio.ensure_future(self._pool.offer(spec)),
            asyncio.get_running_loop().create_future(),
        )
        self._offers.append(offered)
        self._news.set()
        try:
            await asyncio.wait(
                {offered.at_workers, offered.taken}, return_when=asyncio.FIRST_COMPLETED
            )
            if offered.taken.done() or offered.at_workers.cancelled():
                return await offered.taken
            return self._note(episode, offered.context, spec, offered.at_workers.result())
        except asyncio.CancelledError:
            self._withdraw(offered)
            raise
        finally:
            if offered in self._offers:
                self._offers.remove(offered)
            offered.at_workers.cancel()

    async def take(self, request_id: str, wait_s: float) -> tuple[Access, SessionSpec] | None:
        """Takes the episode that was offered first; waits up to `wait_s` seconds for one.

        The same request takes the same episode, until it has ended. None where there is none.
        Raises DrainingError, or SessionLostError where its worker went down.
        """
        known = self._open.get(self._requests.get(request_id, ""))
        if known is not None:
            return known.access, known.spec
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_s
        while (offered := self._next()) is None:
            if self._draining:
                raise DrainingError
            self._news.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._news.wait()
            except TimeoutError:
                return None
        offered.at_workers.cancel()
        try:
            access = await self._pool.open(offered.spec)
        except TreadleError as error:
            if not offered.taken.cancelled():
                offered.taken.set_exception(error)
            raise
        self._note(offered.episode, offered.context, offered.spec, access)
        if offered.taken.cancelled():
            self.close(access.session)
            return None
        self._requests[request_id] = access.session
        offered.taken.set_result(access)
        return access, offered.spec

    def report(self, session: str, token: str, outcome: Outcome) -> None:
        """Ends a session as its client does over HTTP. Safe to repeat.

        Raises UnknownSessionError, InvalidFieldError where the token is not the session's, and
        SessionEndedError where it was ended otherwise.
        """
        if (before := self._ended.get(session)) is not None:
            if before != outcome:
                raise SessionEndedError(session)
            return
        known = self._open.get(session)
        if known is None:
            raise UnknownSessionError(session)
        if token != known.access.token:
            raise InvalidFieldError("token", limit="the token of the session", value="another")
        known.outcome.set_result(outcome)
        self._remember(session, outcome)

    async def outcome(self, session: str) -> Outcome:
        """As Sessions.outcome."""
        known = self._known(session)
        at_worker = asyncio.ensure_future(self._pool.outcome(session))
        try:
            await asyncio.wait({at_worker, known.outcome}, return_when=asyncio.FIRST_COMPLETED)
            return known.outcome.result() if known.outcome.done() else at_worker.result()
        finally:
            at_worker.cancel()

    async def end(self, session: str) -> Captured:
        """As Sessions.end."""
        known = self._known(session)
        try:
            captured = await self._pool.end(session)
        finally:
            self._forget(session)
        if known.outcome.done():
            return replace(captured, outcome=known.outcome.result())
        return captured

    def close(self, session: str) -> None:
        """As Sessions.close."""
        if session in self._open:
            self._forget(session)
            closing = asyncio.create_task(self._close(session))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def generate(self, prompt: Prompt, heard: Heard) -> None:
        """Has the engine sample a turn, in the span of its attempt."""
        known = self._open.get(prompt.session)
        request = GenerationRequest(
            prompt.session,
            prompt.token_ids,
            prompt.sampling,
            known.episode if known else "",
            prompt.media,
            prompt.pictures,
        )
        context = known.context if known else None
        with telemetry.tracer().start_as_current_span("turn", context=context) as span:
            try:
                made = await self.engine.generate(request, partial(self._hear, heard))
            except TreadleError as error:
                if error.kind is Kind.BROKEN:
                    self._cause = error
                    self._broken.set()
                raise
            span.set_attribute("treadle.version", int(made.policy_version.max(initial=0)))

    def _hear(self, heard: Heard, piece: Generated) -> None:
        self.on_tokens(piece.token_ids.size)
        heard(piece)

    async def _close(self, session: str) -> None:
        try:
            await self._pool.end(session)
        except (SessionLostError, UnknownSessionError):
            return

    def _next(self) -> _Offered | None:
        """The oldest offer that nobody took at the workers."""
        while self._offers:
            offered = self._offers.popleft()
            if not offered.at_workers.done():
                return offered
        return None

    def _withdraw(self, offered: _Offered) -> None:
        """Closes the session of an episode that was taken in the moment it was withdrawn."""
        offered.taken.cancel()
        for taken in (offered.taken, offered.at_workers):
            if taken.done() and not taken.cancelled() and taken.exception() is None:
                access = self._note(offered.episode, offered.context, offered.spec, taken.result())
                self.close(access.session)

    def _note(self, episode: str, context: Context, spec: SessionSpec, access: Access) -> Access:
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._open[access.session] = _Open(episode, context, access, spec, outcome)
        return access

    def _known(self, session: str) -> _Open:
        known = self._open.get(session)
        if known is None:
            raise UnknownSessionError(session)
        return known

    def _forget(self, session: str) -> None:
        self._open.pop(session, None)
        self._requests = {key: each for key, each in self._requests.items() if each != session}
        self.engine.release(session)

    def _remember(self, session: str, outcome: Outcome) -> None:
        self._ended[session] = outcome
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
