"""One gateway worker as the replica sees it: a process, a socket, and the sessions on it."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from treadle_agents.record import Generated
from treadle_core.episodes import Segment
from treadle_core.errors import Kind, TreadleError
from treadle_gateway.frames import FrameError, Packer, Say, Unpacker
from treadle_gateway.ports import Prompt
from treadle_gateway.records import (
    PolicyError,
    error_to_list,
    generated_to_list,
    ids_from_bytes,
    outcome_from_map,
    sampling_from_map,
    segment_from_list,
    spec_to_map,
)
from treadle_gateway.settings import GatewaySettings, settings_to_map
from treadle_gateway.terms import Captured, Outcome, SessionLostError, SessionSpec

log = logging.getLogger(__name__)

VISIBLE = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "OMP_NUM_THREADS")
"""Environment variables that a worker sees: it reads what strangers send."""
START_S = 120.0
"""Most seconds from the start of a worker to its first request."""

Generate: TypeAlias = Callable[[Prompt], AsyncGenerator[Generated]]
"""As Policy.generate."""
OnClient: TypeAlias = "Callable[[WorkerProcess, int], None]"
"""Told of a client, by worker and key, that wants an episode, or wants none any more."""


class GatewayStartError(Exception):
    """A worker could not be started, and what it said."""


@dataclass(slots=True, eq=False)
class _Held:
    """One session on a worker, from OPEN to ENDED."""

    opened: "asyncio.Future[None]"
    outcome: "asyncio.Future[Outcome]"
    captured: "asyncio.Future[Captured]"
    segments: list[Segment] = field(default_factory=list[Segment])


class WorkerProcess(asyncio.Protocol):
    """A worker. Make one with `start`; it is gone when `ended` is set."""

    def __init__(
        self, settings: GatewaySettings, generate: Generate, on_take: OnClient, on_leave: OnClient
    ) -> None:
        self._settings = settings
        self._generate = generate
        self._on_take = on_take
        self._on_leave = on_leave
        self._unpacker = Unpacker()
        self._held: dict[str, _Held] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.port = 0
        """Where it listens."""
        self.ended = asyncio.Event()
        """The process is gone and its sessions know."""

    @classmethod
    async def start(
        cls,
        settings: GatewaySettings,
        port: int,
        generate: Generate,
        *,
        on_take: OnClient,
        on_leave: OnClient,
    ) -> "WorkerProcess":
        """Starts a process and waits until it listens.

        Raises GatewayStartError when it refuses, ends or does not come up.
        """
        worker = cls(settings, generate, on_take, on_leave)
        await worker._spawn()
        worker._packer.send(Say.START, settings_to_map(settings), port)
        try:
            async with asyncio.timeout(START_S):
                worker.port = await worker._ready
        except BaseException as error:
            await worker.stop()
            if isinstance(error, TimeoutError):
                raise GatewayStartError(f"no gateway worker after {START_S:g} s") from error
            raise
        return worker

    @property
    def sessions(self) -> int:
        """Sessions that are open here."""
        return len(self._held)

    @property
    def alive(self) -> bool:
        """It can be talked to."""
        return not self.ended.is_set() and not self._transport.is_closing()

    def open(self, session: str, digest: bytes, spec: SessionSpec) -> None:
        """Opens a session for the holder of the token with this sha256."""
        future = asyncio.get_running_loop().create_future
        self._held[session] = _Held(future(), future(), future())
        self._packer.send(Say.OPEN, session, digest, spec_to_map(spec))

    async def opened(self, session: str) -> None:
        """Waits until the client of a session may come. Raises SessionLostError."""
        await asyncio.shield(self._of(session).opened)

    async def outcome(self, session: str) -> Outcome:
        """Waits until the client ended a session. Raises SessionLostError."""
        return await asyncio.shield(self._of(session).outcome)

    async def end(self, session: str) -> Captured:
        """Ends a session and returns what it came to. Raises SessionLostError."""
        captured = self._of(session).captured
        self._packer.send(Say.END, session)
        return await asyncio.shield(captured)

    def abandon(self, session: str) -> None:
        """Ends a session of which nobody wants to know any more."""
        if session in self._held:
            self._packer.send(Say.END, session)

    def _of(self, session: str) -> _Held:
        held = self._held.get(session)
        if held is None:
            raise SessionLostError(session)
        return held

    def drain(self) -> None:
        """Lets no client take an episode any more."""
        self._packer.send(Say.DRAIN)

    def give(self, key: int, offered: dict[str, Any] | None) -> None:
        """Answers a client that wants an episode."""
        self._packer.send(Say.TAKEN, key, offered)

    async def stop(self) -> None:
        """Ends the process."""
        self._kill()
        await self.ended.wait()

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        self._settings.log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._settings.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "treadle_gateway.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={name: os.environ[name] for name in VISIBLE if name in os.environ}
                | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self, sock=ours)
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Follows the process to its end, then tells its sessions."""
        cause = "nobody watched it any more"
        try:
            cause = f"exit status {await self._process.wait()}"
        finally:
            self._kill()
            self._transport.abort()
            for call in self._calls.values():
                call.cancel()
            if not self._ready.done():
                self._ready.set_exception(GatewayStartError(f"the gateway worker ended: {cause}"))
            for session in list(self._held):
                self._lose(session)
            self.ended.set()

    def _lose(self, session: str) -> None:
        held = self._held.pop(session)
        for waiting in (held.opened, held.outcome, held.captured):
            if not waiting.done():
                waiting.set_exception(SessionLostError(session))
                waiting.exception()  # nobody need wait for it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._packer = Packer(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for say, fields in self._unpacker.feed(data):
                self._hear(say, fields)
        except (FrameError, TreadleError, LookupError, ValueError, TypeError):
            log.exception("a gateway worker broke the protocol")
            self._kill()

    def connection_lost(self, exc: Exception | None) -> None:
        self._kill()  # one that lost its line ends by itself, unless it hangs

    def _hear(self, say: Say, fields: list[Any]) -> None:
        if say is Say.GENERATE:
            self._begin(*fields)
        elif say is Say.STOP:
            if call := self._calls.get(fields[0]):
                call.cancel()
        elif say is Say.READY:
            if not self._ready.done():
                self._ready.set_result(fields[0])
        elif say is Say.REFUSED:
            if not self._ready.done():
                self._ready.set_exception(GatewayStartError(fields[0]))
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
            captured = Captured(tuple(held.segments), counts, outcome_from_map(outcome))
            held.captured.set_result(captured)
            self._lose(session)
        elif say is Say.LOST:
            self._lose(session)
        else:
            raise FrameError(f"expected what a worker says, got {say.name}")

    def _begin(self, key: int, session: str, ids: bytes, sampling: dict[str, Any]) -> None:
        prompt = Prompt(session, ids_from_bytes(ids), sampling_from_map(sampling))
        call = self._calls[key] = asyncio.create_task(self._call(key, prompt))
        call.add_done_callback(lambda _: self._calls.pop(key))

    async def _call(self, key: int, prompt: Prompt) -> None:
        """Has the engine sample, and passes on what it says."""
        try:
            async with aclosing(self._generate(prompt)) as pieces:
                async for piece in pieces:
                    self._packer.send(Say.PIECE, key, *generated_to_list(piece))
        except TreadleError as error:
            self._packer.send(Say.FAILED, key, *error_to_list(error))
        except Exception as error:
            log.exception("a generation failed")
            failed = PolicyError(Kind.UNAVAILABLE, f"a fault: {type(error).__name__}", "", None)
            self._packer.send(Say.FAILED, key, *error_to_list(failed))
        else:
            self._packer.send(Say.DONE, key)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
