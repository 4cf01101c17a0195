"""The standard streams of a command: fed and drained while it runs, up to a limit."""

import asyncio
import os
from contextlib import ExitStack
from io import FileIO
from typing import Any

from treadle_agents.processes.ended import Cut


class _Drain(asyncio.Protocol):
    """Keeps what arrives while the budget lasts, and drops the rest, so that nobody blocks."""

    def __init__(self, streams: "Streams") -> None:
        self._streams = streams
        self.kept = bytearray()
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.kept += self._streams.take(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class Streams:
    """Three pipes. Make them with `open`, hand out `theirs`, then `drained`; always `close`."""

    def __init__(self, most: int) -> None:
        self._left = most
        self.over = asyncio.Event()
        """More than `most` bytes came."""
        self._drains: list[_Drain] = []
        self._transports: list[asyncio.BaseTransport] = []

    @classmethod
    async def open(cls, given: bytes, most: int) -> tuple["Streams", tuple[int, int, int]]:
        """Returns the streams, and the command's ends of them, which the caller closes.

        `given` is what the command reads from its standard input; `most` bytes of output and
        errors together are kept.
        """
        streams = cls(most)
        loop = asyncio.get_running_loop()
        with ExitStack() as undo:
            undo.callback(streams.close)
            pairs = [os.pipe() for _ in range(3)]
            (stdin, _), (_, stdout), (_, stderr) = pairs
            for end in (stdin, stdout, stderr):
                undo.callback(os.close, end)
            into = undo.enter_context(FileIO(pairs[0][1], "wb"))
            output = undo.enter_context(FileIO(pairs[1][0], "rb"))
            errors = undo.enter_context(FileIO(pairs[2][0], "rb"))
            for end in (output, errors):
                drain = _Drain(streams)
                transport, _ = await loop.connect_read_pipe(lambda drain=drain: drain, end)
                streams._drains.append(drain)
                streams._transports.append(transport)
            writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, into)
            streams._transports.append(writer)
            writer.write(given)
            writer.write_eof()
            undo.pop_all()
        return streams, (stdin, stdout, stderr)

    def take(self, data: bytes) -> bytes:
        """What of `data` the budget allows."""
        kept = data[: self._left]
        self._left -= len(kept)
        if len(kept) < len(data):
            self.over.set()
        return kept

    async def drained(self) -> tuple[bytes, bytes]:
        """Output and errors, once the last process that holds them has gone."""
        await asyncio.gather(*(drain.closed for drain in self._drains))
        output, errors = (bytes(drain.kept) for drain in self._drains)
        return output, errors

    async def watch(self, ended: asyncio.Future[Any], seconds: float) -> Cut | None:
        """Waits for the command; returns why it is to be killed, None where it has `ended`."""
        over = asyncio.create_task(self.over.wait())
        try:
            await asyncio.wait([ended, over], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if self.over.is_set():
            return Cut.OUTPUT
        return None if ended.done() else Cut.DEADLINE

    def close(self) -> None:
        """Lets go of our ends."""
        for transport in self._transports:
            transport.close()
