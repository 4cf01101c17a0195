"""What all local servers have in common: a directory, an address, and one process at a time."""

import abc
import json
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self, cast

from treadle_runtime.files import write_durably

RECORD = "server.json"
LOG = "server.log"

_PROBE_S = 1.0
_LOOK_S = 0.05


class LocalServerError(RuntimeError):
    """A local server cannot be had; the message says which, and why."""


class LocalServer(abc.ABC):
    """One server of one run; what it was told stays as long as the run's directory."""

    name: ClassVar[str]
    advice: ClassVar[str]
    """What gives a machine the server, or makes a recipe do without it."""

    def __init__(self, run_dir: Path, settings: Mapping[str, str | int]) -> None:
        """`settings` are those that the server was recorded with, or is to be."""
        self.run_dir = run_dir.resolve()
        self.settings = dict(settings)
        self.directory = self.run_dir / "servers" / self.name

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """What clients dial."""

    @abc.abstractmethod
    def binary(self) -> str | None:
        """Path of the program; None where it is not installed."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Writes what the program reads when it starts."""

    @abc.abstractmethod
    def arguments(self) -> list[str]:
        """Command line of the program, its name left out; it runs in the server's directory."""

    def environment(self) -> dict[str, str]:
        """What the program's environment has beside that of who starts it."""
        return {}

    def for_clients(self) -> Mapping[str, str]:
        """What the environment of its clients must have."""
        return {}

    def clean(self) -> None:
        """Removes what lies outside of the run's directory, once the program has ended."""
        return

    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether it answers now; blocks for a second at most."""

    def check(self) -> list[str]:
        """Says what keeps the server from being started, a line each."""
        return [] if self.binary() else [f"{self.name}: not installed; {self.advice}"]

    @classmethod
    def recorded(cls, run_dir: Path) -> Self | None:
        """The server that a run was started with; None where it has none of this kind."""
        try:
            path = run_dir / "servers" / cls.name / RECORD
            settings = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return cls(run_dir, cast("dict[str, str | int]", settings["settings"]))

    @classmethod
    def kept_port(cls, run_dir: Path) -> int:
        """The port that a run's server had, while that is free; else another that is."""
        before = cls.recorded(run_dir)
        return free_port(int(before.settings["port"]) if before else 0)

    def record(self) -> None:
        """Makes the server known to all who look into the run's directory."""
        self.directory.mkdir(parents=True, exist_ok=True)
        said = {"address": self.address, "settings": self.settings}
        write_durably(self.directory / RECORD, json.dumps(said, indent=2).encode())

    def command(self) -> tuple[str, ...]:
        """Starts the recorded server as this very process; what a supervisor runs."""
        return (
            sys.executable,
            "-m",
            "treadle_runtime.local_servers.launch",
            self.name,
            str(self.run_dir),
        )

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Whether it answered within `timeout_s` seconds; blocks."""
        give_up = time.monotonic() + timeout_s
        while not self.is_ready():
            if time.monotonic() > give_up:
                return False
            time.sleep(_LOOK_S)
        return True


def answers(
    family: socket.AddressFamily, address: object, *, ask: bytes, expected: bytes | None
) -> bool:
    """Whether a server greets, or answers `ask`, with what begins as `expected`.

    With None expected it is enough that it takes a connection.
    """
    with socket.socket(family) as client:
        client.settimeout(_PROBE_S)
        try:
            client.connect(cast("str", address))
            client.sendall(ask)
            return expected is None or client.recv(64).startswith(expected)
        except OSError:
            return False


def free_port(preferred: int = 0) -> int:
    """A port of the loopback interface that nobody listens on: `preferred`, or else another."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LocalServerError("no port of 127.0.0.1 is free")
