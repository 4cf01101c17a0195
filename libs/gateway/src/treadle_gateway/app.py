"""The routes of a worker: the wires, the models, health and sessions, and nothing else."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from hmac import compare_digest
from typing import Any, TypeVar

from aiohttp import web

from treadle_agents.images.picture import Picture
from treadle_core.tickets import Json
from treadle_gateway.access import SESSION_HEADER, digest_of, tokens_of, unauthenticated
from treadle_gateway.bodies import BodyReader
from treadle_gateway.conversation import Ask
from treadle_gateway.delivery import Answer
from treadle_gateway.endings import outcome_of
from treadle_gateway.errors import RETRY_S, RefusedError
from treadle_gateway.markup.template import Markup
from treadle_gateway.questions import Worded, check_tokens
from treadle_gateway.replies import Replies
from treadle_gateway.sessions import Session, Sessions
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.takers import Takers
from treadle_gateway.turns import Turns
from treadle_gateway.wires.body import parsed
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.generate import Generate
from treadle_gateway.wires.messages import Messages, counted
from treadle_gateway.wires.models import check_model, model, models
from treadle_gateway.wires.responses import Responses
from treadle_gateway.wires.wire import Begun, Wire

log = logging.getLogger(__name__)

IN_THREAD_BYTES = 256 * 1024
"""Bodies of more bytes are understood in a thread: the loop has other clients.

Not those of fewer: a thread that is busy with Python makes the loop wait at each of its reads.
"""
AT_ONCE = 2
"""Requests that are understood in one turn of the loop, up to some milliseconds each."""

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SESSION = web.RequestKey("session", Session)
"""Of a request that may talk in one."""

CHAT, RESPONSES, MESSAGES, GENERATE = Chat(), Responses(), Messages(), Generate()

_WIRES: Mapping[str, Wire] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
}


@dataclass(slots=True)
class Gateway:
    """Handlers of the routes."""

    settings: GatewaySettings
    sessions: Sessions
    turns: Turns
    takers: Takers
    markup: Markup
    vocabulary: int
    """Tokens that the policy knows: ids below it."""
    run_token_sha256: bytes
    """Of the token that takes offered episodes; empty: none does."""
    _began: int = field(default_factory=lambda: int(time.time()), init=False)
    _running: int = field(default=0, init=False)
    _bodies: BodyReader = field(init=False)
    _few: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE), init=False)

    def __post_init__(self) -> None:
        """Bounds bodies as the settings say."""
        self._bodies = BodyReader(self.settings.limits)

    def application(self) -> web.Application:
        """All routes."""
        application = web.Application(middlewares=[self._guard], client_max_size=0)
        add = application.router.add_route
        for prefix in ("", "/s/{session}"):
            for path, wire in _WIRES.items():
                add("POST", f"{prefix}{path}", partial(self._reply, wire))
            add("POST", f"{prefix}/v1/messages/count_tokens", self._count)
            add("POST", f"{prefix}/inference/v1/generate", self._generate)
            add("GET", f"{prefix}/v1/models", self._models)
            add("GET", f"{prefix}/v1/models/{{name}}", self._model)
        add("GET", "/health", self._health)
        add("GET", "/healthz", self._health)
        add("POST", "/sessions", self._take)
        add("POST", "/sessions/{session}/end", self._end)
        return application

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Tells every refusal in the shape of the wire that was asked."""
        allowed: dict[str, str] = {}
        try:
            _check_plain(request)
            return await handler(request)
        except RefusedError as error:
            refused = error
        except web.HTTPMethodNotAllowed as error:
            allowed["Allow"] = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path[:200]} takes {allowed['Allow']}"
            refused = RefusedError("wrong_method", message)
        except web.HTTPNotFound:
            refused = RefusedError("unknown_path", f"there is no {request.path[:200]}")
        except ConnectionError:
            return web.Response()  # to nobody: nothing is written to a connection that is gone
        except Exception as error:
            log.exception("a request failed")
            refused = RefusedError("internal", f"a fault of the gateway: {type(error).__name__}")
        return await self._refuse(request, refused, allowed)

    async def _refuse(
        self, request: web.Request, refused: RefusedError, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        session = request.get(_SESSION)
        if session is not None:
            session.counts[f"refused.{refused.kind}"] += 1
        if request.writer.output_size and request.transport is not None:
            request.transport.abort()  # half an answer was given: a second one would follow it
            return web.Response()
        status, told, body = _wire_of(request).refusal(refused)
        try:
            return await self._answer(request).whole(status, {**told, **headers}, body)
        except ConnectionError:
            return web.Response()

    async def _reply(self, wire: Wire, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        with session.request(), self._place():
            ask = await self._understand(request, wire.ask)
            check_model(ask.model, self.settings.model_name)
            question = Worded(self.markup, ask, wire.call_prefix, self._pictures(session, ask))
            live = await self.turns.live(session, question)
            replies = self._replies(session, request)
            if not ask.stream:
                return await replies.whole(live, partial(wire.reply, ask))
            begun = Begun(live.id, live.created, live.turn.prompt_tokens, live.turn.cached)
            return await replies.stream(live, wire.stream(ask, begun))

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        with session.request(), self._place():
            asked = await self._understand(request, GENERATE.ask)
            check_model(asked.model, self.settings.model_name)
            check_tokens(asked, self.vocabulary)
            placeholder = self.markup.placeholder
            question = session.tokens.question(asked, placeholder=placeholder)
            live = await self.turns.live(session, question)
            replies = self._replies(session, request)
            return await replies.whole(live, partial(GENERATE.reply, asked))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        with session.request(), self._place():
            ask = await self._understand(request, MESSAGES.ask)
            check_model(ask.model, self.settings.model_name)
            pictures = self._pictures(session, ask)
            question = Worded(self.markup, ask, MESSAGES.call_prefix, pictures)
            tokens = (await self.turns.in_thread(question.whole)).token_ids.size
        return await self._answer(request).whole(200, {}, counted(tokens))

    def _pictures(self, session: Session, ask: Ask) -> Mapping[str, Picture]:
        """The images of the session, those of a request among them. Raises RefusedError."""
        if ask.media or ask.references:
            self.markup.check_images()
        return session.media.admit(ask)

    async def _understand(
        self, request: web.Request, read: Callable[[dict[str, Json], Mapping[str, str]], T]
    ) -> T:
        """What a request asks. Raises RefusedError."""
        data = await self._bodies.read(request)
        headers = {name.lower(): value for name, value in request.headers.items()}

        def understand() -> T:
            return read(parsed(data, max_bytes=self.settings.limits.body_bytes), headers)

        heavy = len(data) > IN_THREAD_BYTES
        asked = await self.turns.in_thread(understand) if heavy else None
        # What follows, up to the sampling, holds the loop: others have their turn between a few.
        await self._few.acquire()
        asyncio.get_running_loop().call_soon(self._few.release)
        return understand() if asked is None else asked

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return await self._answer(request).whole(200, {}, models(**self._described()))

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        check_model(request.match_info["name"], self.settings.model_name)
        return await self._answer(request).whole(200, {}, model(**self._described()))

    def _described(self) -> dict[str, Any]:
        return {
            "name": self.settings.model_name,
            "created": self._began,
            "max_context": self.settings.max_context,
        }

    async def _health(self, request: web.Request) -> web.StreamResponse:
        state = "draining" if self.takers.draining else "serving"
        return await self._answer(request).whole(200, {}, {"status": state})

    async def _take(self, request: web.Request) -> web.StreamResponse:
        shown = tokens_of(request.headers)
        known = [compare_digest(self.run_token_sha256, digest_of(token)) for token in shown]
        if not any(known):
            raise unauthenticated(shown=bool(shown))
        wait_s = _wait_s(await self._object(request), self.settings.limits.wait_s)
        offered = await self.takers.take(wait_s)
        try:
            return await self._answer(request).whole(200, {}, offered)
        except BaseException:
            self.sessions.untaken(offered["session"])
            raise

    async def _end(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        self.sessions.ended_by_client(session, outcome_of(await self._object(request)))
        return await self._answer(request).whole(200, {}, {"session": session.id, "ended": True})

    def _session(self, request: web.Request) -> Session:
        named = request.match_info.get("session") or request.headers.get(SESSION_HEADER, "")
        session = request[_SESSION] = self.sessions.of(tokens_of(request.headers), named)
        return session

    async def _object(self, request: web.Request) -> Mapping[str, Json]:
        data = await self._bodies.read(request)
        return parsed(data) if data else {}

    def _answer(self, request: web.Request) -> Answer:
        return Answer(request, slow_reader_s=self.settings.limits.slow_reader_s)

    def _replies(self, session: Session, request: web.Request) -> Replies:
        return Replies(session, self._answer(request), self.settings.limits.ping_s)

    @contextmanager
    def _place(self) -> Generator[None]:
        most = self.settings.limits.requests
        if self._running >= most:
            message = f"requests: {most} requests of all sessions run already"
            raise RefusedError("busy", message, code="requests", retry_after_s=RETRY_S)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1


def _check_plain(request: web.Request) -> None:
    if request.method == "GET" and "Upgrade" in request.headers:
        raise RefusedError("upgrade", "only plain HTTP is spoken here")


def _wire_of(request: web.Request) -> Wire:
    """The wire in whose shape a refusal is told."""
    if "/messages" in request.path or "anthropic-version" in request.headers:
        return MESSAGES
    return RESPONSES if request.path.endswith("/responses") else CHAT


def _wait_s(body: Mapping[str, Json], most: float) -> float:
    wait_s = body.get("wait_s", most)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not wait_s >= 0:
        raise RefusedError("invalid", "wait_s: expected seconds, 0 or more", field="wait_s")
    return min(float(wait_s), most)
