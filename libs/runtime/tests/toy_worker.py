"""A worker for tests: does as it is told. Run it with the descriptor of its socket."""

import os
import signal
import socket
import subprocess
import sys
from enum import IntEnum
from typing import Any

from treadle_runtime.workers.framing import Framing


class Say(IntEnum):
    START = 0
    READY = 1
    REFUSED = 2
    DO = 3
    DONE = 4


FRAMING = Framing(Say, max_bytes=10_000)


def does(what: str) -> Any:
    """What comes of an order."""
    if what == "environment":
        return dict(os.environ)
    if what == "leave a child":
        return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid
    return what


def obey(line: socket.socket, say: Say, what: str) -> None:
    """Answers one frame, or does not."""
    if what == "exit":
        sys.exit("as I was told")
    if what == "hang":
        signal.pause()
    if what == "write nonsense":
        line.sendall(b"\xff\xff\xff\xff")
    elif what == "refuse":
        line.sendall(FRAMING.pack(Say.REFUSED, "I would rather not"))
    elif say is Say.START:
        line.sendall(FRAMING.pack(Say.READY))
    else:
        line.sendall(FRAMING.pack(Say.DONE, does(what)))


if __name__ == "__main__":
    end = socket.socket(fileno=int(sys.argv[1]))
    unpacker = FRAMING.unpacker()
    while data := end.recv(65536):
        for heard, (told,) in unpacker.feed(data):
            obey(end, heard, told)
