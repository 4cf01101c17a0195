"""The gateway as a replica sees it: worker processes, and the sessions that are spread on them."""

import asyncio
import json
import uuid
from collections import deque
from dataclasses import dataclass
from typing import Any

from treadle_gateway.access import digest_of, new_token
from treadle_gateway.policy_calls import Generate
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
from treadle_gateway.worker_process import GatewayWorker
from treadle_runtime.workers.pool import WorkerPool


@dataclass(slots=True, eq=False)
class _Offered:
    """An episode that waits for a client."""

    spec: SessionSpec
    taken: "asyncio.Future[Access]"


class GatewayPool(WorkerPool[GatewayWorker]):
    """Workers that agents talk to. `start` it, then `run` it beside the sessions."""

    def __init__(self, settings: GatewaySettings, workers: int, generate: Generate) -> None:
        """`generate` is called for every request of every session."""
        super().__init__(workers)
        self._settings = settings
        self._generate = generate
        self._sessions: dict[str, GatewayWorker] = {}
        self._offers: deque[_Offered] = deque()
        self._clients: deque[tuple[GatewayWorker, int]] = deque()
        self._draining = False

    async def start_worker(self, place: int) -> GatewayWorker:
        port = self._settings.port + place if self._settings.port else 0
        worker = await GatewayWorker.start(
            self._settings, port, self._generate, on_take=self._want, on_leave=self._leave
        )
        if self._draining:
            worker.drain()
        return worker

    async def close(self) -> None:
        """Stops all workers; sessions that are open are lost."""
        self.drain()
        await super().close()

    def drain(self) -> None:
        """Opens no session any more; those that are open go on."""
        self._draining = True
        for worker in self.live:
            worker.drain()
        for offered in self._offers:
            if not offered.taken.done():
                offered.taken.set_exception(DrainingError())
        self._offers.clear()

    @property
    def urls(self) -> tuple[str, ...]:
        """Where the workers are that serve now."""
        return tuple(self._url(worker) for worker in self.live)

    async def open(self, spec: SessionSpec) -> Access:
        """Opens a session on the worker with the fewest.

        Raises DrainingError, or SessionLostError where no worker serves now.
        """
        if self._draining:
            raise DrainingError
        worker = min(self.live, key=lambda live: live.sessions, default=None)
        if worker is None:
            raise SessionLostError("new")
        access = self._open_on(worker, spec)
        try:
            await worker.opened(access.session)
        except BaseException:
            self._abandon(access.session)
            raise
        return access

    async def offer(self, spec: SessionSpec) -> Access:
        """Waits until a client takes the episode by `POST /sessions`; its session is open then.

        Cancelling the call withdraws the offer. Raises DrainingError.
        """
        if self._draining:
            raise DrainingError
        offered = _Offered(spec, asyncio.get_running_loop().create_future())
        self._offers.append(offered)
        self._match()
        try:
            return await offered.taken
        except asyncio.CancelledError:
            if offered in self._offers:
                self._offers.remove(offered)
            elif offered.taken.done() and not offered.taken.cancelled():
                self._abandon(offered.taken.result().session)
            raise

    async def outcome(self, session: str) -> Outcome:
        """Waits until the client ends its session, or its time is over.

        Raises SessionLostError when its worker died, UnknownSessionError.
        """
        return await self._worker_of(session).outcome(session)

    async def end(self, session: str) -> Captured:
        """Ends a session and returns what it came to; its token is good for nothing more.

        Raises SessionLostError when its worker died, UnknownSessionError.
        """
        worker = self._worker_of(session)
        del self._sessions[session]
        return await worker.end(session)

    def _worker_of(self, session: str) -> GatewayWorker:
        worker = self._sessions.get(session)
        if worker is None:
            raise UnknownSessionError(session)
        return worker

    def _open_on(self, worker: GatewayWorker, spec: SessionSpec) -> Access:
        session, token = uuid.uuid4().hex, new_token()
        worker.open(session, digest_of(token), spec)
        self._sessions[session] = worker
        root = self._url(worker)
        urls = {
            "openai": f"{root}/s/{session}/v1",
            "anthropic": f"{root}/s/{session}",
            "end": f"{root}/sessions/{session}/end",
        }
        return Access(session, token, urls)

    def _abandon(self, session: str) -> None:
        if worker := self._sessions.pop(session, None):
            worker.abandon(session)

    def _url(self, worker: GatewayWorker) -> str:
        host = self._settings.advertise or self._settings.host
        scheme = "http" if self._settings.certificate is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{worker.port}"

    def _want(self, worker: GatewayWorker, key: int) -> None:
        if self._draining:
            worker.give(key, None)
            return
        self._clients.append((worker, key))
        self._match()

    def _leave(self, worker: GatewayWorker, key: int) -> None:
        if (worker, key) in self._clients:
            self._clients.remove((worker, key))

    def _match(self) -> None:
        """Gives the oldest offers to the clients that wait longest."""
        while self._offers and self._clients:
            if self._offers[0].taken.done():  # withdrawn, and not yet taken away
                self._offers.popleft()
                continue
            worker, key = self._clients.popleft()
            if worker.alive:
                offered = self._offers.popleft()
                access = self._open_on(worker, offered.spec)
                worker.give(key, _to_client(access, offered.spec))
                offered.taken.set_result(access)


def _to_client(access: Access, spec: SessionSpec) -> dict[str, Any]:
    """What the client of an offered episode is told; its task is JSON still."""
    return {
        "session": access.session,
        "token": access.token,
        "urls": dict(access.urls),
        "task": json.dumps(dict(spec.task)),
        "expires_in_s": spec.deadline_s,
        "max_requests": spec.max_requests,
        "max_concurrent": spec.max_concurrent,
        "max_sampled": spec.max_sampled,
    }
