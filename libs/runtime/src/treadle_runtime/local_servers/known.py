"""The kinds of local servers, and running one of them for a reader."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

from treadle_runtime.drain_order import SUPERVISOR_FD
from treadle_runtime.local_servers.nats import NatsServer
from treadle_runtime.local_servers.ray import RayServer
from treadle_runtime.local_servers.redis import RedisServer
from treadle_runtime.local_servers.server import LOG, LocalServer, LocalServerError

KINDS: dict[str, type[LocalServer]] = {
    kind.name: kind for kind in (NatsServer, RayServer, RedisServer)
}

READY_S = 30.0
"""How long a server may take until it answers; one with much data loads it first."""
_GRACE_S = 15.0


def recorded(run_dir: Path, address: str) -> LocalServer | None:
    """The local server of a run that has this address; None for anybody else's."""
    servers = (kind.recorded(run_dir) for kind in KINDS.values())
    return next((server for server in servers if server and server.address == address), None)


@contextlib.contextmanager
def running(run_dir: Path, address: str) -> Generator[None]:
    """While it lasts, the server at `address` runs, if it is one of the run's own.

    One that runs already is left as it is. Blocks until it answers; raises LocalServerError where
    it does not.
    """
    server = recorded(run_dir, address)
    if server is None or server.is_ready():
        yield
        return
    with _started(server) as process:
        for _ in range(int(READY_S)):
            if server.wait_until_ready(1.0):
                break
            if process.poll() is not None:
                raise LocalServerError(f"{server.name} ended: {last_line(server)}")
        else:
            raise LocalServerError(f"{server.name} does not answer after {READY_S:.0f} s")
        yield


@contextlib.contextmanager
def _started(server: LocalServer) -> Generator["subprocess.Popen[bytes]"]:
    """The server as a child that ends with this process, however that ends."""
    read, write = os.pipe()
    try:
        with (server.directory / LOG).open("ab") as log:
            process = subprocess.Popen(  # noqa: S603, our own module
                server.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, SUPERVISOR_FD: str(read)},
                pass_fds=(read,),
                start_new_session=True,
            )
    finally:
        os.close(read)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(write)
        server.clean()


def last_line(server: LocalServer) -> str:
    """The last that the server said."""
    lines = (server.directory / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"
