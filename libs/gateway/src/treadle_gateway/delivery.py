"""Writes answers, and knows when a socket took their last byte."""

import asyncio
import socket
import struct
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.http_writer import StreamWriter

from treadle_core.tickets import Json
from treadle_gateway.wires.sse import dumps

_SERVER = {"Server": "treadle"}
_SSE = _SERVER | {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class Answer:
    """The answer to one request. A client that does not read is let go of, not waited for."""

    def __init__(self, request: web.Request, *, slow_reader_s: float) -> None:
        """Every write ends when the kernel has all of it, within `slow_reader_s` seconds.

        With TLS, when the layer of TLS has, which keeps up to 64 KiB for itself.
        """
        self._request = request
        self._slow_reader_s = slow_reader_s
        self._response: web.StreamResponse | None = None
        transport = request.transport
        if transport is not None:
            # A write then waits until nothing is left here: what is buffered is bounded by it.
            # Plain transports pause above the limit, those of TLS at it.
            transport.set_write_buffer_limits(
                high=1 if transport.get_extra_info("ssl_object") else 0
            )

    @property
    def begun(self) -> bool:
        """Something of a stream is written, so that its status cannot change any more."""
        return self._response is not None

    async def whole(
        self, status: int, headers: Mapping[str, str], body: Mapping[str, Json]
    ) -> web.StreamResponse:
        """Answers with JSON; returns when the socket has it. Raises ConnectionError."""
        data = dumps(body).encode("ascii")
        response = web.Response(
            status=status,
            headers=_SERVER | {"Content-Length": str(len(data))} | dict(headers),
            content_type="application/json",
        )
        await response.prepare(self._request)
        # The head, which waits for it, and the body in one piece.
        await self._put(b"" if self._request.method == "HEAD" else data)
        await response.write_eof()
        return response

    async def write(self, data: bytes) -> None:
        """Writes more of a stream, which begins with it. Raises ConnectionError."""
        await self._begin()
        await self._put(data)

    async def end(self, data: bytes) -> web.StreamResponse:
        """Writes the last of a stream; returns when the socket has it. Raises ConnectionError."""
        async with self._taken():
            response = await self._begin()
            await response.write_eof(data)
        return response

    async def cut(self, data: bytes) -> web.StreamResponse:
        """Writes the last of a stream that failed, and ends its connection.

        A clean end would look like success. Raises ConnectionError.
        """
        async with self._taken():
            response = await self._begin()
            await response.write(data)
        response.force_close()
        if self._request.transport is not None:
            self._request.transport.abort()
        return response

    async def _put(self, data: bytes) -> None:
        """Writes; returns when the socket has it. Raises ConnectionError."""
        writer, transport = self._request.writer, self._request.transport
        assert isinstance(writer, StreamWriter)  # noqa: S101, a server's writer is one
        await writer.write(data, drain=False)
        # Most writes are taken at once: whatever waits comes with a timer, once for every token.
        if transport is None or transport.get_write_buffer_size() or transport.is_closing():
            async with self._taken():
                pass

    async def _begin(self) -> web.StreamResponse:
        if self._response is None:
            self._response = web.StreamResponse(headers=_SSE)
            await self._response.prepare(self._request)
        return self._response

    @asynccontextmanager
    async def _taken(self) -> AsyncGenerator[None]:
        """Ends when the socket has all that was written within. Raises ConnectionError."""
        try:
            async with asyncio.timeout(self._slow_reader_s):
                yield
                await self._request.writer.drain()
        except TimeoutError as error:
            self._reset()
            raise ConnectionError("the client does not read") from error
        if self._request.transport is None or self._request.transport.is_closing():
            raise ConnectionError("the client went away")

    def _reset(self) -> None:
        """Ends the connection, and drops what the kernel still holds for it."""
        transport = self._request.transport
        if transport is not None:
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
