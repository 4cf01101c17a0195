"""A process that carries the calls between services, and harms them when it is told to.

    python fault_proxy.py --link NAME LISTEN TARGET [--link ...]

An address is `unix:/path` or `host:port`. On stdin one JSON object a line: `{"link": NAME, "fault":
FAULT, ...}` with one of FAULTS, and what that takes; `none` heals. On stdout one JSON object for
each connection whose target has answered a call: `link`, `opened` and `answered`, seconds of the
machine's monotonic clock. It ends when stdin does.

It carries bytes and knows no TLS. Of HTTP/2 it knows frames, enough to tell an answer from an
error: a call that failed has trailers and no data.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

FAULTS = ("none", "hold", "mute", "delay", "hole", "half", "cut", "flip")
"""none: as they come · hold: nothing passes until healed · mute: no answer passes until healed ·
delay: each piece `seconds` late, and up to `jitter` more · hole: bytes vanish, and healing cuts the
connections · half: the target hears the callers hang up, its answers still pass · cut: a connection
is cut after `after` bytes · flip: the next frame's length has a bit wrong, once a connection"""

_PIECE = 64 * 1024
_REACHED_S = 2.0
"""A target that takes no connection within so long is away."""
_FRAME_HEADER = 9
_DATA = 0
_PREFACE = b"PRI * HTTP/2.0"


class Answers:
    """Looks for the first answer in what a server sends."""

    def __init__(self) -> None:
        self._found = False
        self._is_http2 = False
        self._head = b""
        self._skip = 0

    def request(self, piece: bytes) -> None:
        """Takes what the caller sends: its first bytes say what is spoken."""
        self._is_http2 = self._is_http2 or piece.startswith(_PREFACE)

    def response(self, piece: bytes) -> bool:
        """Takes what the server sends; whether the first answer is in it."""
        if self._found:
            return False
        self._found = (
            self._has_data(piece) if self._is_http2 else not piece.startswith((b"-", b"INFO"))
        )
        return self._found

    def _has_data(self, piece: bytes) -> bool:
        while piece:
            if self._skip:
                passed = min(self._skip, len(piece))
                piece, self._skip = piece[passed:], self._skip - passed
                continue
            lacking = _FRAME_HEADER - len(self._head)
            self._head, piece = self._head + piece[:lacking], piece[lacking:]
            if len(self._head) == _FRAME_HEADER:
                self._skip = int.from_bytes(self._head[:3], "big")
                if self._head[3] == _DATA and self._skip:
                    return True
                self._head = b""
        return False


@dataclass(eq=False)
class Link:
    """One address that is listened at, where it leads, and what is wrong with it now."""

    name: str
    listen: str
    target: str
    fault: str = "none"
    settings: dict[str, float] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    connections: set["Connection"] = field(default_factory=set)

    def set(self, fault: str, **settings: float) -> None:
        """Does it to all connections, those that come included. Raises ValueError."""
        if fault not in FAULTS:
            raise ValueError(f"fault: expected one of {', '.join(FAULTS)}, got {fault}")
        for connection in tuple(self.connections):
            if self.fault == "hole":
                connection.abort()
            elif fault == "half":
                connection.half_close()
        self.fault, self.settings = fault, settings
        self.changed.set()
        self.changed = asyncio.Event()


class Connection:
    """A caller's connection and ours to the target."""

    def __init__(self, link: Link, caller: Any, target: Any) -> None:
        """Both are a reader and a writer."""
        self._link = link
        self._caller, self._target = caller, target
        self._opened = time.monotonic()
        self._answers = Answers()
        self._carried = 0
        self._flipped = False

    async def carry(self) -> None:
        """Until either side closes."""
        self._link.connections.add(self)
        caller, target = self._caller, self._target
        ways = [
            asyncio.ensure_future(self._pump(caller[0], target[1], is_answer=False)),
            asyncio.ensure_future(self._pump(target[0], caller[1], is_answer=True)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._link.connections.discard(self)
            self.abort()

    def abort(self) -> None:
        for _, writer in (self._caller, self._target):
            writer.transport.abort()

    def half_close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._target[1].write_eof()

    async def _pump(self, reader: Any, writer: Any, *, is_answer: bool) -> None:
        while piece := await reader.read(_PIECE):
            passed = await self._harm(piece, is_answer=is_answer)
            if passed is None:
                continue
            if not is_answer:
                self._answers.request(passed)
            writer.write(passed)
            await writer.drain()
            if is_answer and self._answers.response(passed):
                say(link=self._link.name, opened=self._opened, answered=time.monotonic())
            if self._is_spent(len(passed)):
                return

    async def _harm(self, piece: bytes, *, is_answer: bool) -> bytes | None:
        """What becomes of a piece on its way; None where it vanishes."""
        link = self._link
        while link.fault == "hold" or (link.fault == "mute" and is_answer):
            await link.changed.wait()
        if link.fault == "hole" or (link.fault == "half" and not is_answer):
            return None
        if link.fault == "delay":
            spread = random.uniform(0, link.settings.get("jitter", 0))  # noqa: S311, no secret
            await asyncio.sleep(link.settings["seconds"] + spread)
        if link.fault == "flip" and not self._flipped:
            self._flipped = True
            return bytes([piece[0] ^ 0x80]) + piece[1:]
        return piece

    def _is_spent(self, passed: int) -> bool:
        if self._link.fault != "cut":
            return False
        self._carried += passed
        return self._carried >= self._link.settings["after"]


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def _connect(address: str) -> Any:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_REACHED_S):
        return await asyncio.open_connection(host, int(port))


async def listen(link: Link) -> asyncio.Server:
    """Carries what comes to the link's address until the server is closed."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = await _connect(link.target)
        except OSError:
            writer.transport.abort()
            return
        # What either side breaks is the other's to notice.
        with contextlib.suppress(OSError):
            await Connection(link, (reader, writer), target).carry()

    if link.listen.startswith("unix:"):
        return await asyncio.start_unix_server(accept, link.listen.removeprefix("unix:"))
    host, _, port = link.listen.rpartition(":")
    return await asyncio.start_server(accept, host, int(port))


async def main(links: list[Link]) -> None:
    """Carries them, and does what stdin says."""
    by_name = {link.name: link for link in links}
    servers = [await listen(link) for link in links]
    say(ready=len(servers))
    orders = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    while line := await orders.readline():
        order = json.loads(line)
        by_name[order.pop("link")].set(order.pop("fault"), **order)
    for server in servers:
        server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", nargs=3, action="append", required=True)
    given = parser.parse_args().link
    asyncio.run(main([Link(*words) for words in given]))
