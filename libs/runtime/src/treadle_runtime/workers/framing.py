"""How a process and its worker talk over a socket: framed msgpack lists.

A frame is its length as uint32, little-endian, then one msgpack list whose first element is a Say:
a number that says what the elements after it are. Whoever has workers has an IntEnum of these.
"""

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, TypeVar, cast

import msgpack

from treadle_core.errors import Kind, TreadleError

SayT = TypeVar("SayT", bound=IntEnum)

_LENGTH = struct.Struct("<I")


class FrameError(TreadleError):
    """What is said, or was heard, is no frame, or not the frame that belongs there."""

    kind = Kind.INVALID
    reason = "BAD_FRAME"

    def __init__(self, *, limit: object, value: object) -> None:
        super().__init__(
            f"frame: expected {limit}, got {value}", field="frame", limit=limit, value=value
        )


@dataclass(frozen=True, slots=True)
class Framing(Generic[SayT]):
    """What both ends of a socket have to agree on."""

    says: type[SayT]
    max_bytes: int
    """Most bytes of a frame, its length left out; at most 2**32 - 1."""
    any_keys: bool = False
    """Keys of maps may be other than text. Not where the peer runs code that is not ours: it could
    choose numbers that collide."""

    def pack(self, say: SayT, *fields: Any) -> bytes:
        """One frame. Raises FrameError where it is too long."""
        body = cast("bytes", msgpack.packb([int(say), *fields]))
        if len(body) > self.max_bytes:
            raise self.too_long(len(body))
        return _LENGTH.pack(len(body)) + body

    def too_long(self, size: int) -> FrameError:
        """What is raised of a frame of so many bytes."""
        return FrameError(limit=f"at most {self.max_bytes} bytes", value=size)

    def unpacker(self) -> "Unpacker[SayT]":
        """Reads a stream of frames."""
        return Unpacker(self)

    def packer(self, transport: asyncio.WriteTransport) -> "Packer[SayT]":
        """Writes frames to a transport."""
        return Packer(self, transport)


class Unpacker(Generic[SayT]):
    """Cuts a byte stream into frames."""

    def __init__(self, framing: Framing[SayT]) -> None:
        self._framing = framing
        self._says = {say.value: say for say in framing.says}
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[SayT, list[Any]]]:
        """Yields the frames that are complete. Raises FrameError at the first bad one."""
        framing, rest = self._framing, self._rest
        rest += data
        start = 0
        while len(rest) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(rest, start)
            if size > framing.max_bytes:
                raise framing.too_long(size)
            end = start + _LENGTH.size + size
            if len(rest) < end:
                break
            yield self._parse(bytes(rest[start + _LENGTH.size : end]))
            start = end
        del rest[:start]

    def _parse(self, body: bytes) -> tuple[SayT, list[Any]]:
        limit = "a list that begins with a Say"
        try:
            strict = not self._framing.any_keys
            message = cast("object", msgpack.unpackb(body, strict_map_key=strict))
            if isinstance(message, list):
                said = cast("list[Any]", message)
                return self._says[said[0]], said[1:]
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            raise FrameError(limit=limit, value=f"{error!s:.200}") from error
        raise FrameError(limit=limit, value=f"a {type(message).__name__}")


class Packer(Generic[SayT]):
    """Writes frames to a transport; those of one turn of the loop in one piece."""

    def __init__(self, framing: Framing[SayT], transport: asyncio.WriteTransport) -> None:
        self._framing = framing
        self._transport = transport
        self._waiting: list[bytes] = []

    def send(self, say: SayT, *fields: Any) -> None:
        """Sends a frame soon; a transport that is closed swallows it. Raises FrameError."""
        frame = self._framing.pack(say, *fields)
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self.flush)
        self._waiting.append(frame)

    def flush(self) -> None:
        """Writes what waits."""
        if self._waiting and not self._transport.is_closing():
            self._transport.write(b"".join(self._waiting))
        self._waiting.clear()
