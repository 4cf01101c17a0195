"""A run's own Ray: the head of a cluster of one node, on the loopback interface."""

import secrets
import shutil
import socket
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from treadle_runtime import sockets
from treadle_runtime.local_servers.server import LocalServer, answers

_STORE_BYTES = 256 * 2**20


class RayServer(LocalServer):
    """Ray's object store, for payloads on their way. It runs nobody's tasks, and keeps nothing."""

    name = "ray"
    advice = (
        "install it (pip install ray), set run.payloads.ray.address to a cluster that is there, "
        "or leave run.payloads.ray out"
    )

    @classmethod
    def of(cls, run_dir: Path) -> "RayServer":
        """Goes on with the port that it had, while that is free."""
        return cls(run_dir, {"port": cls.kept_port(run_dir)})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.settings['port']}"

    @property
    def _token(self) -> Path:
        return self.directory / "token"

    @property
    def session(self) -> Path:
        """Where its sockets lie; their paths are long, and the run's directory may be."""
        return sockets.short_folder(self.run_dir, self.name)

    def binary(self) -> str | None:
        return shutil.which("ray", path=sysconfig.get_path("scripts")) or shutil.which("ray")

    def prepare(self) -> None:
        self.clean()
        self.session.mkdir(mode=0o700, parents=True)
        if not self._token.is_file():
            self._token.touch(mode=0o600)
            self._token.write_text(secrets.token_hex(32), encoding="ascii")

    def clean(self) -> None:
        shutil.rmtree(self.session, ignore_errors=True)

    def arguments(self) -> list[str]:
        return [
            "start",
            "--head",
            "--block",
            "--node-ip-address=127.0.0.1",
            f"--port={self.settings['port']}",
            f"--object-store-memory={_STORE_BYTES}",
            "--num-cpus=1",
            "--num-gpus=0",
            "--include-dashboard=false",
            "--disable-usage-stats",
            f"--temp-dir={self.session}",
        ]

    def for_clients(self) -> Mapping[str, str]:
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self._token)}

    def environment(self) -> dict[str, str]:
        # Without the first, Ray dials the host's own address where it is told the loopback one.
        loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
        return loopback | dict(self.for_clients())

    def is_ready(self) -> bool:
        address = ("127.0.0.1", int(self.settings["port"]))
        return answers(socket.AF_INET, address, ask=b"", expected=None)
