"""Containers that proofs hurt, by the name of what is done to them."""

import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

from small_run import RunFailedError
from testcontainers.core.container import DockerContainer

from treadle_runtime.local_servers.server import free_port

LOOK_S = 0.1
_OURS = 2.0
"""Runnable processes a core, of which a run that is starting has as many by itself."""
RECOVERY_S = 30.0 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1) / _OURS)
"""After so long everything goes on: 30 s, and more where others use the same cores."""
DURABLE = "redis-server --appendonly yes --appendfsync always --maxmemory-policy noeviction"


def until(what: str, holds: Callable[[], Any], *, timeout_s: float = RECOVERY_S) -> float:
    """Seconds until it holds.

    Raises RunFailedError with its name where that takes longer than `timeout_s`.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout_s:
            raise RunFailedError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(LOOK_S)
    return time.monotonic() - began


class Member:
    """One container, over all its lives: started, killed, stopped, paused, or made anew."""

    def __init__(self, make: Callable[[], DockerContainer]) -> None:
        """`make` makes the container, with all that it keeps the same from one life to the next."""
        self._make = make
        self._made: DockerContainer | None = None
        self.port = 0
        """On this host's loopback; 0 where it is not reached from here."""

    @property
    def exists(self) -> bool:
        """Whether there is a container, started or not."""
        return self._made is not None

    @property
    def docker(self) -> Any:
        """The Docker client's view of it, which `reload` makes new."""
        if self._made is None:
            raise RunFailedError("there is no such container")
        return self._made.get_wrapped_container()

    def start(self) -> None:
        """Starts it: the same container where there is one, with what it has written."""
        if self._made is None:
            self._made = self._make()  # one that does not start is removed too
            self._made.start()
        else:
            self.docker.start()

    def kill(self) -> None:
        """Ends it as a crash does."""
        self.docker.kill(signal="SIGKILL")
        self.docker.wait(timeout=RECOVERY_S)

    def stop(self) -> None:
        """Asks it to end, and waits for that."""
        self.docker.stop(timeout=int(RECOVERY_S))

    @contextmanager
    def paused(self) -> Generator[None]:
        """Every process of it stands still meanwhile."""
        self.docker.pause()
        try:
            yield
        finally:
            self.docker.unpause()

    def port_of(self, port: int) -> int:
        """Where on its loopback this host reaches a published port in this life."""
        self.docker.reload()
        return int(self.docker.ports[f"{port}/tcp"][0]["HostPort"])

    def remove(self) -> None:
        """Ends it, and forgets all that it has written."""
        if self._made is not None:
            self._made.stop()
            self._made = None

    def logs(self) -> str:
        """The end of what it has said."""
        return "" if self._made is None else self.docker.logs(tail=60).decode(errors="replace")


def server(image: str, command: str, port: int) -> Member:
    """A server that this host reaches at the same `127.0.0.1:port` in all lives."""
    at = free_port()

    def make() -> DockerContainer:
        return published(DockerContainer(image, command=command), port, at)

    member = Member(make)
    member.port = at
    return member


def published(container: DockerContainer, port: int, at: int | None = None) -> DockerContainer:
    """The container, whose port this host will reach at `127.0.0.1:at`, or at one that is free."""
    # The client library takes an address too, and declares numbers alone.
    cast("dict[str, Any]", container.ports)[f"{port}/tcp"] = ("127.0.0.1", at)
    return container
