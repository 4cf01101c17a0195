"""One gateway worker as the replica sees it: a process, and the sessions on it."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from treadle_core.episodes import Segment
from treadle_gateway.frames import FRAMING, Say
from treadle_gateway.policy_calls import Generate, PolicyCalls
from treadle_gateway.records import outcome_from_map, segment_from_list, spec_to_map
from treadle_gateway.settings import GatewaySettings, settings_to_map
from treadle_gateway.terms import Captured, Outcome, SessionLostError, SessionSpec
from treadle_runtime.workers.framing import FrameError
from treadle_runtime.workers.process import WorkerProcess

OnClient: TypeAlias = "Callable[[GatewayWorker, int], None]"
"""Told of a client, by worker and key, that wants an episode, or wants none any more."""


@dataclass(slots=True, eq=False)
class _Held:
    """One session on a worker, from OPEN to ENDED."""

    opened: "asyncio.Future[None]"
    outcome: "asyncio.Future[Outcome]"
    captured: "asyncio.Future[Captured]"
    segments: list[Segment] = field(default_factory=list[Segment])


class GatewayWorker(WorkerProcess[Say]):
    """A worker. Make one with `start`."""

    def __init__(self, generate: Generate, on_take: OnClient, on_leave: OnClient) -> None:
        super().__init__("gateway worker", ("-m", "treadle_gateway.worker"), FRAMING)
        self._generate = generate
        self._on_take = on_take
        self._on_leave = on_leave
        self._held: dict[str, _Held] = {}
        self.port = 0
        """Where it listens."""

    @classmethod
    async def start(
        cls,
        settings: GatewaySettings,
        port: int,
        generate: Generate,
        *,
        on_take: OnClient,
        on_leave: OnClient,
    ) -> "GatewayWorker":
        """Starts a process and waits until it listens. Raises WorkerStartError."""
        worker = cls(generate, on_take, on_leave)
        settings.log.parent.mkdir(parents=True, exist_ok=True)
        output = os.open(settings.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        await worker.begin(output, Say.START, settings_to_map(settings), port)
        return worker

    @property
    def sessions(self) -> int:
        """Sessions that are open here."""
        return len(self._held)

    def open(self, session: str, digest: bytes, spec: SessionSpec) -> None:
        """Opens a session for the holder of the token with this sha256."""
        future = asyncio.get_running_loop().create_future
        self._held[session] = _Held(future(), future(), future())
        self.packer.send(Say.OPEN, session, digest, spec_to_map(spec))

    async def opened(self, session: str) -> None:
        """Waits until the client of a session may come. Raises SessionLostError."""
        await asyncio.shield(self._of(session).opened)

    async def outcome(self, session: str) -> Outcome:
        """Waits until the client ended a session. Raises SessionLostError."""
        return await asyncio.shield(self._of(session).outcome)

    async def end(self, session: str) -> Captured:
        """Ends a session and returns what it came to. Raises SessionLostError."""
        captured = self._of(session).captured
        self.packer.send(Say.END, session)
        return await asyncio.shield(captured)

    def abandon(self, session: str) -> None:
        """Ends a session of which nobody wants to know any more."""
        if session in self._held:
            self.packer.send(Say.END, session)

    def _of(self, session: str) -> _Held:
        held = self._held.get(session)
        if held is None:
            raise SessionLostError(session)
        return held

    def drain(self) -> None:
        """Lets no client take an episode any more."""
        self.packer.send(Say.DRAIN)

    def give(self, key: int, offered: dict[str, Any] | None) -> None:
        """Answers a client that wants an episode."""
        self.packer.send(Say.TAKEN, key, offered)

    async def gone(self, cause: str) -> None:
        self._calls.close()
        for session in list(self._held):
            self._lose(session)

    def _lose(self, session: str) -> None:
        held = self._held.pop(session)
        self._calls.forget(session)
        for waiting in (held.opened, held.outcome, held.captured):
            if not waiting.done():
                waiting.set_exception(SessionLostError(session))
                waiting.exception()  # nobody need wait for it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._calls = PolicyCalls(self._generate, self.packer)

    def hear(self, say: Say, fields: list[Any]) -> None:
        if say is Say.GENERATE:
            self._calls.begin(*fields)
        elif say is Say.STOP:
            self._calls.stop(fields[0])
        elif say is Say.PICTURE:
            self._calls.show(*fields)
        elif say is Say.READY:
            self.port = fields[0]
            self.ready()
        elif say is Say.REFUSED:
            self.refuse(fields[0])
        elif say is Say.TAKE:
            self._on_take(self, fields[0])
        elif say is Say.LEAVE:
            self._on_leave(self, fields[0])
        else:
            self._hear_of(say, *fields)

    def _hear_of(self, say: Say, session: str, *fields: Any) -> None:
        """What a frame says of a session."""
        held = self._held[session]
        if say is Say.OPENED:
            held.opened.set_result(None)
        elif say is Say.OUTCOME and (outcome := outcome_from_map(fields[0])) is not None:
            held.outcome.set_result(outcome)
        elif say is Say.SEGMENT:
            held.segments.append(segment_from_list(fields))
        elif say is Say.ENDED:
            counts, outcome = fields
            captured = Captured(
                tuple(held.segments),
                counts,
                outcome_from_map(outcome),
                tuple(self._calls.pictures(session).values()),
            )
            held.captured.set_result(captured)
            self._lose(session)
        elif say is Say.LOST:
            self._lose(session)
        else:
            raise FrameError(limit="what a worker says", value=say.name)
