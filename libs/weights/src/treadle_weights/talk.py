"""The control between a sender and its receivers: JSON lines over TCP, the same both ways.

A receiver says `join` (with `transfer`, `engine`, `epoch` and what it `holds`); the sender answers
`form` (a group's name, epoch, rank and size), `go` (how the bytes travel), `wait` (go on waiting)
or `refused` (a reason). Weights never travel by it.
"""

import contextlib
import json
import socket
import threading
import time
from typing import Any, cast

from treadle_core.errors import Kind, TreadleError

LONGEST = 1 << 16
"""Bytes of a line, at most."""

_TICK_S = 1.0
"""A peer that takes nothing for so long is gone; silence is looked at as often."""

Said = dict[str, Any]


class PortTakenError(TreadleError):
    """Another process, or another sender of this one, listens where a sender is to."""

    kind = Kind.CONFLICT
    reason = "PORT_TAKEN"


class TalkEndedError(TreadleError):
    """The other end is gone, cut off, silent for too long, or speaks something else."""

    kind = Kind.UNAVAILABLE
    reason = "TALK_ENDED"


class Talk:
    """One end of a connection. One thread reads, any may say."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Once and for all: a socket has one time-out, and two threads use this one.
        self._socket.settimeout(_TICK_S)
        self._rest = b""
        self._saying = threading.Lock()

    @property
    def own(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def say(self, **said: Any) -> None:
        """Raises TalkEndedError."""
        line = json.dumps(said, separators=(",", ":")).encode() + b"\n"
        try:
            with self._saying:
                self._socket.sendall(line)
        except OSError as error:
            raise _ended(str(error)) from error

    def hear(self, timeout_s: float | None) -> Said:
        """The next line; raises TalkEndedError, after `timeout_s` of silence too."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST:
                raise _ended(f"a line of more than {LONGEST} bytes")
            self._read()
            if b"\n" not in self._rest and until is not None and time.monotonic() >= until:
                raise _ended(f"silent for {timeout_s:g} s")
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            said: object = json.loads(line)
        except ValueError as error:
            raise _ended("a line that is no JSON") from error
        if not isinstance(said, dict):
            raise _ended("a line that is no object")
        return cast("Said", said)

    def _read(self) -> None:
        """What has come, or nothing after a tick."""
        try:
            data = self._socket.recv(LONGEST)
        except TimeoutError:
            return
        except OSError as error:
            raise _ended(str(error) or type(error).__name__) from error
        if not data:
            raise _ended("closed")
        self._rest += data

    def close(self) -> None:
        """Ends both ways, and wakes who reads. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def listener(host: str, port: int) -> socket.socket:
    """Binds and holds; raises PortTakenError."""
    try:
        return socket.create_server((host, port), backlog=256)
    except OSError as error:
        raise PortTakenError(
            f"{host}:{port}: {error.strerror}", field="port", limit="a free port", value=port
        ) from error


def connect(host: str, port: int, timeout_s: float) -> Talk:
    """Raises TalkEndedError where nobody listens."""
    try:
        return Talk(socket.create_connection((host, port), timeout=timeout_s))
    except OSError as error:
        raise _ended(f"{host}:{port}: {error.strerror or error}") from error


def _ended(why: str) -> TalkEndedError:
    return TalkEndedError(why, field="control", limit="a peer that answers", value=why)
