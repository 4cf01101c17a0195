"""For benchmarks: a sidecar of one's own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle_payloads.files import FileStore
from treadle_payloads.sidecar_store import SidecarStore

_PATIENCE_S = 60.0


class SidecarProcess:
    """The sidecar of one node, in a directory that is its own; started by `start`."""

    def __init__(self, directory: Path, run_id: str = "benchmark") -> None:
        """The directory exists; its path has to be short enough for a socket."""
        self.directory = directory
        self.run_id = run_id
        self.name = f"unix:{directory}/node"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process."""
        if self._process is None:
            raise LookupError("it was not started")
        return self._process.pid

    @property
    def files(self) -> FileStore:
        """Its spool."""
        return FileStore(self.directory / "payloads")

    def store(self, *, far: bool = False) -> SidecarStore:
        """As a process on the node has it, or as one elsewhere."""
        upload, directory = f"{self.directory}/upload", self.directory / "payloads"
        if far:
            return SidecarStore(directory=self.directory / "elsewhere", run_id=self.run_id)
        return SidecarStore(upload=upload, node=self.name, directory=directory, run_id=self.run_id)

    def start(self) -> "SidecarProcess":
        """Starts it; returns once it serves."""
        config = self.directory / "payloads.yaml"
        directory = str(self.directory)
        run = {"id": self.run_id, "dir": directory, "model": directory}
        settings = {"run": run, "listen": self.name, "upload": f"{directory}/upload"}
        config.write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [sys.executable, "-m", "treadle_payloads.sidecar", "--config", str(config)]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # noqa: S603, our own
        with grpc.insecure_channel(self.name, [("grpc.default_authority", "localhost")]) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            stub.Check(request, timeout=_PATIENCE_S, wait_for_ready=True)
        return self

    def stop(self) -> None:
        """Drains it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(_PATIENCE_S)
