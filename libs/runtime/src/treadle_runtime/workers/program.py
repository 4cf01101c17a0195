"""The worker's own end: a program that serves whoever started it."""

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn


def run(name: str, serve: Callable[[socket.socket], Coroutine[Any, Any, None]]) -> None:
    """Serves the socket whose descriptor is the program's argument; it logs under a name."""
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it says when it ends
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # noqa: FBT003, not for what this process starts
    asyncio.run(serve(socket.socket(fileno=descriptor)))


async def stay(stalled_s: float) -> NoReturn:
    """Waits for ever. Where the loop does not turn for so long, the process says why and ends."""
    while True:
        faulthandler.dump_traceback_later(stalled_s, exit=True)
        await asyncio.sleep(stalled_s / 30)
