"""For tests: a real gRPC server in this process, and a Redis server of one's own, to break."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import grpc.aio

from treadle_runtime.channel import connect
from treadle_runtime.interceptors import CallInterceptor


@contextlib.asynccontextmanager
async def running(
    register: Callable[[grpc.aio.Server], None], domain: str
) -> AsyncGenerator[grpc.aio.Channel]:
    """Serves what `register` adds, with the house's interceptor; yields a channel to it."""
    with tempfile.TemporaryDirectory(prefix="treadle") as directory:
        address = f"unix:{Path(directory) / 'socket'}"
        server = grpc.aio.server(interceptors=[CallInterceptor(domain)])
        register(server)
        server.add_insecure_port(address)
        await server.start()
        async with connect(address) as channel:
            try:
                yield channel
            finally:
                await server.stop(None)


class RedisProcess:
    """A `redis-server` on a unix socket in a directory that is its own; started by `start`."""

    def __init__(self, directory: Path) -> None:
        """Makes the directory; its path has to be short enough for a socket."""
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.socket = directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._settings = {
            "port": "0",
            "unixsocket": str(self.socket),
            "dir": str(directory),
            "logfile": str(directory / "redis.log"),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
        }
        self.process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        """Whether there is a `redis-server` on PATH."""
        return shutil.which("redis-server") is not None

    def start(self, **settings: str) -> "RedisProcess":
        """Starts it, with what its directory holds; returns once it answers, within 30 s.

        `settings` are those of redis.conf, with underscores, for this life.
        """
        chosen = self._settings | {name.replace("_", "-"): set_ for name, set_ in settings.items()}
        words = [word for name, value in chosen.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen(["redis-server", *words])  # noqa: S603, S607
        until = time.monotonic() + 30
        while not self._answers():
            if time.monotonic() > until or self.process.poll() is not None:
                raise RuntimeError(f"redis-server does not serve: see {self.directory}/redis.log")
            time.sleep(0.01)
        return self

    def kill(self) -> None:
        """Ends it as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def forget(self) -> None:
        """Loses what a server that is not running had stored."""
        shutil.rmtree(self.directory / "appendonlydir", ignore_errors=True)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(5)
            peer.connect(str(self.socket))
            peer.sendall(b"PING\r\n")
            return peer.recv(16).startswith(b"+PONG")
        return False
