"""A sidecar as a process of its own, and stores that use it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from treadle_payloads.sidecar_store import SidecarStore

RUN = "run"
PATIENCE_S = 60.0


@dataclass
class Sidecar:
    """One node of a run; its sockets and its spool lie in `directory`."""

    directory: Path
    settings: dict[str, Any] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    process: "subprocess.Popen[str] | None" = None

    @property
    def spool(self) -> Path:
        return self.directory / "payloads"

    @property
    def upload(self) -> Path:
        return self.directory / "upload"

    @property
    def node(self) -> str:
        return f"unix:{self.directory}/node"

    def start(self, **environment: str) -> None:
        self.kill()
        config = self.directory / "payloads.yaml"
        values = {
            "run": {"id": RUN, "dir": str(self.directory), "model": str(self.directory)},
            "listen": self.node,
            "upload": str(self.upload),
        }
        config.write_text(yaml.safe_dump(values | self.settings), encoding="utf-8")
        command = (sys.executable, "-m", "treadle_payloads.sidecar", "--config", str(config))
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*self.inside, *command], stderr=log, text=True, env=os.environ | environment
            )
        self.wait_until_up()

    def wait_until_up(self) -> None:
        with grpc.insecure_channel(self.node, [("grpc.default_authority", "localhost")]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S, wait_for_ready=True)
        give_up = time.monotonic() + PATIENCE_S
        while not self.upload.is_socket():
            assert time.monotonic() < give_up
            time.sleep(0.01)

    def signal(self, signum: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(signum)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def store(self, *, far: bool = False, **changed: Any) -> SidecarStore:
        """As a process on its node has it, or as one that cannot see its files."""
        directory = self.directory / "elsewhere" if far else self.spool
        here = {"upload": str(self.upload), "node": self.node, "directory": directory}
        return SidecarStore(**here | {"run_id": RUN} | changed)

    def files(self) -> list[Path]:
        """All objects, whole or not."""
        folders = [self.spool / "tmp", *self.spool.glob("[0-9a-f][0-9a-f]")]
        return [path for folder in folders for path in folder.iterdir()]


@contextlib.contextmanager
def running(directory: Path, **settings: Any) -> Iterator[Sidecar]:
    sidecar = Sidecar(directory, settings)
    sidecar.start()
    try:
        yield sidecar
    finally:
        sidecar.kill()
