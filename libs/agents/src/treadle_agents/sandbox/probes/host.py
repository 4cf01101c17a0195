"""What there is to find and to harm on the host, for probes: none of it is real."""

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECRET = "TREADLE_PROBE_SECRET"  # noqa: S105, the name of one


@dataclass(frozen=True, slots=True)
class Host:
    """The evidence, and the means to see whether it was touched."""

    folder: Path
    """Everybody may read it and write into it."""
    marker: str
    """Part of the command line of `victim`."""
    secret: str
    victim: asyncio.subprocess.Process
    port: int
    reached: list[str]
    """Servers that somebody connected to."""

    @property
    def file(self) -> Path:
        """Holds the secret."""
        return self.folder / "secret"

    @property
    def survivor(self) -> str:
        """Part of the command line of what is to outlive its box."""
        return f"{self.marker}-survivor"

    @property
    def evidence(self) -> dict[str, Any]:
        """For attempts."""
        return {
            "folder": str(self.folder),
            "file": str(self.file),
            "marker": self.marker,
            "secret": self.secret,
            "survivor": self.survivor,
            "pid": self.victim.pid,
            "port": self.port,
            "socket": str(self.folder / "socket"),
            "abstract": self.marker,
            "other": f"{self.marker}-other",
        }

    def harm(self) -> str:
        """What was done to the host; nothing is the rule."""
        if self.reached:
            return f"reached {self.reached.pop()}"
        if self.victim.returncode is not None:
            return "killed a process of the host"
        if self.file.read_text(encoding="utf-8") != self.secret:
            return "changed a file of the host"
        found = {entry.name for entry in self.folder.iterdir()} - {"secret", "socket"}
        return f"left {found.pop()} on the host" if found else self._survivors()

    def _survivors(self) -> str:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                text = (entry / "cmdline").read_text(encoding="utf-8", errors="replace")
                if entry.name.isdigit() and self.survivor in text:
                    return f"left process {entry.name}"
        return ""


@asynccontextmanager
async def host() -> AsyncGenerator[Host]:
    """Lays the evidence out, and takes it away."""
    marker, secret = f"probe-{secrets.token_hex(8)}", secrets.token_hex(16)
    reached: list[str] = []
    async with contextlib.AsyncExitStack() as planted:
        folder = planted.enter_context(_folder(secret))
        os.environ[SECRET] = secret
        planted.callback(os.environ.pop, SECRET, None)
        servers = _servers(folder, marker)
        for server in servers:
            name = repr(server.getsockname())
            accepting = await asyncio.start_server(_hear(reached, name), sock=server)
            planted.callback(accepting.close)
        lives = "import signal; signal.pause()"
        victim = await asyncio.create_subprocess_exec(sys.executable, "-c", lives, marker)
        planted.push_async_callback(_end, victim)
        yield Host(folder, marker, secret, victim, servers[0].getsockname()[1], reached)


@contextlib.contextmanager
def _folder(secret: str) -> Generator[Path]:
    """A folder in which everybody may do everything, with the secret."""
    with tempfile.TemporaryDirectory(prefix="treadle") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "secret").write_text(secret, encoding="utf-8")
        (folder / "secret").chmod(0o666)
        yield folder


def _servers(folder: Path, marker: str) -> list[socket.socket]:
    """On the loopback, on a socket that everybody may use, and on one without a file."""
    places = (("127.0.0.1", 0), str(folder / "socket"), f"\0{marker}")
    families = (socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX)
    servers = [socket.socket(family) for family in families]
    for server, place in zip(servers, places, strict=True):
        server.bind(place)
    (folder / "socket").chmod(0o777)
    return servers


def _hear(reached: list[str], name: str) -> Any:
    def heard(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.append(name)
        writer.close()

    return heard


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
