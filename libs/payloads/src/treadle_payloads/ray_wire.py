"""Messages between a reader of Ray and its process: JSON, and the file that holds the bytes."""

import array
import json
import socket
import struct
from typing import Any

_HEAD = struct.Struct("<I")
MOST_BYTES = 64 << 20
"""Longest message; the bytes of payloads are not in it."""


def send(connection: socket.socket, message: dict[str, Any], *descriptors: int) -> None:
    """Sends a message, with open files. Raises OSError."""
    body = json.dumps(message).encode()
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    connection.sendmsg([_HEAD.pack(len(body))], [rights] if descriptors else [])
    connection.sendall(body)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message, and its files, which the caller closes. Raises OSError or EOFError."""
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    if len(head) < _HEAD.size:
        raise EOFError
    (left,) = _HEAD.unpack(head)
    if left > MOST_BYTES:
        raise OSError(f"a message of {left} bytes, more than {MOST_BYTES}")
    body = bytearray()
    while len(body) < left:
        part = connection.recv(left - len(body))
        if not part:
            raise EOFError
        body += part
    return json.loads(body), descriptors
