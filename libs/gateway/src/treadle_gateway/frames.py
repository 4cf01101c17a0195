"""What a replica and its gateway workers say to each other over a socket: framed msgpack lists.

A frame is its length as uint32, little-endian, then one msgpack list whose first element is a Say.
Arrays travel as their bytes, little-endian.
"""

import asyncio
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, cast

import msgpack

MAX_FRAME = 256 * 1024 * 1024
"""Most bytes of one frame; the longest is a segment."""

_LENGTH = struct.Struct("<I")


class Say(IntEnum):
    """What a frame says; the fields follow it. `key` names a request of a worker."""

    START = 0
    """To the worker, first: settings, port."""
    READY = 1
    """From the worker: the port that it listens on."""
    REFUSED = 2
    """From the worker: it cannot serve; message."""
    OPEN = 3
    """To the worker: session, sha256 of its token, spec."""
    END = 4
    """To the worker: session; SEGMENTs and ENDED come back."""
    SEGMENT = 5
    """From the worker: session, one segment."""
    ENDED = 6
    """From the worker: session, counts, outcome or None; nothing of it is left."""
    GENERATE = 7
    """From the worker: key, session, ids of the prompt, sampling."""
    PIECE = 8
    """To the worker: key, ids, log-probabilities, versions, context versions, length."""
    DONE = 9
    """To the worker: key; no further piece."""
    FAILED = 10
    """To the worker: key, kind, message, field, retry_after_s."""
    STOP = 11
    """From the worker: key; no further piece is wanted."""
    OUTCOME = 12
    """From the worker: session, how its client ended it, or that its time was over."""
    TAKE = 13
    """From the worker: key; a client wants an offered episode."""
    TAKEN = 14
    """To the worker: key, access and spec, or None: none is offered any more."""
    LEAVE = 15
    """From the worker: key; the client of TAKE does not wait any more."""
    DRAIN = 16
    """To the worker: no new sessions."""
    LOST = 17
    """From the worker: session; what came of it cannot be given up."""
    OPENED = 18
    """From the worker: session; its client may come."""


class FrameError(Exception):
    """The peer sent what is no frame."""


def pack(say: Say, *fields: Any) -> bytes:
    """One frame. Raises FrameError when it is too long."""
    body = cast("bytes", msgpack.packb([int(say), *fields]))
    if len(body) > MAX_FRAME:
        raise FrameError(f"frame {say.name}: expected at most {MAX_FRAME} bytes, got {len(body)}")
    return _LENGTH.pack(len(body)) + body


class Unpacker:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Say, list[Any]]]:
        """Yields the frames that are complete. Raises FrameError at the first bad one."""
        self._rest += data
        start = 0
        while len(self._rest) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._rest, start)
            if size > MAX_FRAME:
                raise FrameError(f"a frame: expected at most {MAX_FRAME} bytes, got {size}")
            end = start + _LENGTH.size + size
            if len(self._rest) < end:
                break
            yield _parse(bytes(self._rest[start + _LENGTH.size : end]))
            start = end
        del self._rest[:start]


class Packer:
    """Writes frames to a transport; those of one turn of the loop in one piece."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport
        self._waiting: list[bytes] = []

    def send(self, say: Say, *fields: Any) -> None:
        """Sends a frame soon; a transport that is closed swallows it. Raises FrameError."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(pack(say, *fields))

    def flush(self) -> None:
        """Writes what waits."""
        if self._waiting and not self._transport.is_closing():
            self._transport.write(b"".join(self._waiting))
        self._waiting.clear()


def _parse(body: bytes) -> tuple[Say, list[Any]]:
    try:
        message = cast("list[Any]", msgpack.unpackb(body, strict_map_key=False))
        return Say(message[0]), message[1:]
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
        raise FrameError(f"not a frame: {error}") from error
