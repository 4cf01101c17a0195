"""A run's own Redis, on a unix socket."""

import shutil
import socket
from pathlib import Path

from treadle_runtime import sockets
from treadle_runtime.local_servers.server import LocalServer, answers

CONF = "redis.conf"

_CONF = """\
port 0
unixsocket {socket}
unixsocketperm 700
daemonize no
dir {directory}
save ""
appendonly yes
appendfsync {appendfsync}
# A torn end is for people to look at.
aof-load-truncated no
maxmemory-policy noeviction
"""


class RedisServer(LocalServer):
    """Redis as a ledger needs it: it keeps what it acknowledged, and evicts nothing."""

    name = "redis"
    advice = (
        "install redis-server (Debian: apt-get install redis-server), set "
        "experience.ledger.url to a server that is there, or take the ledger sqlite"
    )

    @classmethod
    def of(cls, run_dir: Path, *, durability: str) -> "RedisServer":
        """`durability` as the ledger's: `process` fsyncs each second, all others each write."""
        return cls(run_dir, {"appendfsync": "everysec" if durability == "process" else "always"})

    @property
    def address(self) -> str:
        return f"unix://{self._socket}"

    @property
    def _socket(self) -> Path:
        return sockets.path(self.run_dir, self.name)

    def binary(self) -> str | None:
        return shutil.which("redis-server") or shutil.which("redis-server", path="/usr/bin")

    def prepare(self) -> None:
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        text = _CONF.format(
            socket=self._socket,
            directory=self.directory,
            appendfsync=self.settings["appendfsync"],
        )
        (self.directory / CONF).write_text(text, encoding="utf-8")

    def clean(self) -> None:
        sockets.remove_if_empty(self.run_dir)

    def arguments(self) -> list[str]:
        return [str(self.directory / CONF)]

    def is_ready(self) -> bool:
        return answers(socket.AF_UNIX, str(self._socket), ask=b"PING\r\n", expected=b"+PONG")
