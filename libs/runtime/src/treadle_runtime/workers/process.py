"""One worker as its owner sees it: a process group, and a socket to it."""

import abc
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, Generic, cast

from treadle_core.errors import Kind, TreadleError
from treadle_runtime.workers.framing import Framing, Packer, SayT

log = logging.getLogger(__name__)

VISIBLE = (
    *("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "PYTHONPATH", "OMP_NUM_THREADS"),
    "TREADLE_RUN",
)
"""Environment variables that a worker sees: it runs code that is not ours, or reads what strangers
send, and so finds no credentials."""
START_S = 120.0
"""Most seconds from the start of a worker until it is ready; all that it imports included."""
LAST_S = 1.0
"""Seconds in which the last words of a process arrive, and in which one without a line ends."""


class WorkerStartError(TreadleError):
    """A worker could not be started, and what it said."""

    kind = Kind.BROKEN
    reason = "WORKER_START"


class WorkerProcess(asyncio.Protocol, abc.ABC, Generic[SayT]):
    """A worker. A subclass begins it, hears it, and says what its end means.

    It is ended with all that it started: when it breaks the protocol, when its line is cut, and
    when its own process ends. It is over when `ended` is set.
    """

    packer: Packer[SayT]
    """What is said to it; once it was begun."""

    def __init__(self, name: str, program: Sequence[str], framing: Framing[SayT]) -> None:
        """`program` are arguments of Python; the descriptor of a socket follows them."""
        self.ended = asyncio.Event()
        """The process is gone, and who had something on it knows."""
        self._name = name
        self._program = program
        self._framing = framing
        self._unpacker = framing.unpacker()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._cut = asyncio.Event()
        self._killed_because = ""

    @abc.abstractmethod
    def hear(self, say: SayT, fields: list[Any]) -> None:
        """Takes a frame; calls `ready` or `refuse` when it is the first.

        Whatever it raises means that the worker broke the protocol.
        """

    @abc.abstractmethod
    async def gone(self, cause: str) -> None:
        """Tells those who have something on it that it is gone; all that it said was heard."""

    async def begin(self, output: int, say: SayT, *fields: Any) -> None:
        """Starts the process, says something, and waits until it is ready.

        It writes to the descriptor `output`, which is closed here.
        Raises WorkerStartError when it refuses, ends or is not ready in time.
        """
        await self._spawn(output)
        try:
            self.packer.send(say, *fields)
            async with asyncio.timeout(START_S):
                await self._ready
        except BaseException as error:
            await self.stop()
            if isinstance(error, TimeoutError):
                message = f"no {self._name} after {START_S:g} s"
                raise WorkerStartError(message, field=self._name, limit=START_S) from error
            raise

    def ready(self) -> None:
        """It said that it is."""
        if not self._ready.done():
            self._ready.set_result(None)

    def refuse(self, why: str) -> None:
        """It said why it cannot be."""
        if not self._ready.done():
            self._ready.set_exception(WorkerStartError(why, field=self._name))

    @property
    def alive(self) -> bool:
        """It can be talked to."""
        return not (self._killed_because or self._cut.is_set() or self.ended.is_set())

    def kill(self, cause: str) -> None:
        """Ends the process and all that it started; the first cause is what `gone` is told."""
        self._killed_because = self._killed_because or cause
        self._kill_group()

    async def stop(self) -> None:
        """Ends the process and all that it started, and waits for it."""
        self.kill("it was stopped")
        await self.ended.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.packer = self._framing.packer(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for say, fields in self._unpacker.feed(data):
                self.hear(say, fields)
        except Exception as error:
            log.exception("%s %d broke the protocol", self._name, self._process.pid)
            self.kill(f"it broke the protocol: {type(error).__name__}: {error}")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cut.set()
        # One that lost its line ends by itself, unless it hangs.
        asyncio.get_running_loop().call_later(LAST_S, self._kill_group)

    async def _spawn(self, output: int) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, *self._program, str(theirs.fileno())),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={name: os.environ[name] for name in VISIBLE if name in os.environ}
                    | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"},
                )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(output)
        await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Follows the process to its end."""
        cause = "nobody watched it any more"
        try:
            cause = f"exit status {await self._process.wait()}"
            self._kill_group()
            # What it said before it ended may still be on its way.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self._cut.wait()
        finally:
            self._kill_group()
            self._transport.abort()
            cause = self._killed_because or cause
            try:
                await self.gone(cause)
            except Exception:  # whoever waits for its end waits for nothing else
                log.exception("the end of %s %d could not be told", self._name, self._process.pid)
            finally:
                self.refuse(f"the {self._name} ended: {cause}")
                self.ended.set()

    def _kill_group(self) -> None:
        if not self.ended.is_set():  # its number may be another's since
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
