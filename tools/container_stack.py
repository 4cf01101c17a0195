"""A short run as containers, for the nemesis: its links, its networks, its members."""

import contextlib
import os
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import container_engine
import container_images
from container_fleet import PORTS, REDIS_PORT, START_S, Fleet, user
from container_members import RECOVERY_S, until
from containers import revision
from links import BELL, ENDS, LEDGER, PROGRAM, SIDECAR, Link, Links, arguments
from nemesis import DEADLY, Fault, Means
from small_run import account
from testcontainers.core.container import DockerContainer

from treadle_runtime.measures import Measure

LINKS = "links"
"""The host name of the proxy."""
_ANY = "0.0.0.0"  # noqa: S104, of a container
_ALL = (*ENDS, LEDGER, BELL, SIDECAR)
_FIRST_PORT = 7101
_PORTS = {**PORTS, "redis": REDIS_PORT, "nats": 4222}
_LAST_STEPS = 8
"""Steps after the last fault: more than the run has tasks open for."""
_RECOVERED_S = 2 * RECOVERY_S
"""Longest wait for a recovery; what takes longer is none."""
_REMEMBERS = "redis"
"""A run refuses a ledger that lost its state, which has a test of its own."""


class ProxyContainer:
    """A fault proxy as one container more of a fleet."""

    def __init__(self, fleet: Fleet, links: Sequence[Link]) -> None:
        """Starts it where all members reach it."""
        # On each network it has another address, and callers on all of them.
        here = [replace(each, listen=each.listen.replace(LINKS, _ANY)) for each in links]
        made = DockerContainer("python:3.11-slim")
        made.with_command(["python", "/fault_proxy.py", *arguments(here)])
        made.with_volume_mapping(str(PROGRAM), "/fault_proxy.py")
        made.with_kwargs(user=user(), init=True, stdin_open=True)
        self._made = fleet.join_all(made, LINKS)
        docker: Any = self._made.get_wrapped_container()
        self._stdin: Any = docker.attach_socket(params={"stdin": 1, "stream": 1})
        self._said: Any = docker.attach(stdout=True, stderr=False, stream=True, logs=True)

    def lines(self) -> Iterator[str]:
        begun = b""
        for piece in self._said:
            *whole, begun = (begun + piece).split(b"\n")
            yield from (line.decode() for line in whole)

    def tell(self, line: str) -> None:
        # The client gives its socket to read from; it leads both ways.
        os.write(self._stdin.fileno(), line.encode())

    def stop(self) -> None:
        self._made.stop()
        for stream in (self._said, self._stdin):
            # The client closes its own view of a socket, and leaves the socket open.
            response = stream._response  # noqa: SLF001
            line = response.raw._fp.fp.raw._sock  # noqa: SLF001
            response.close()
            line.close()


class ContainerStack:
    """A fleet of containers, each of which is started again by who ended it."""

    def __init__(self, fleet: Fleet, links: Links, means: Means) -> None:
        """The fleet is laid out, and its links are carried."""
        self._fleet = fleet
        self._links = links
        self.means = means
        self._lost: set[str] = set()

    def begin(self) -> list[str]:
        self._fleet.start_all()
        until("the first step", lambda: self._fleet.step() >= 1, timeout_s=START_S)
        return sorted(self._fleet.members)

    def step(self) -> int:
        return self._fleet.step()

    def end(self) -> int:
        return self._fleet.finish(steps=_LAST_STEPS)

    def account(self) -> list[Measure]:
        return account(self._fleet)

    def kill(self) -> None:
        for name, member in self._fleet.members.items():
            (self._fleet.work / f"{name}.log").write_text(member.logs(), encoding="utf-8")

    def harm(self, fault: Fault) -> int:
        if fault.kind not in (*DEADLY, "stop", "part"):
            self._links.set(fault.target, fault.kind, **fault.settings)
            return 0
        member, pid = self._fleet.members[fault.target], self._alive(fault.target)
        if fault.kind == "drain":
            member.stop()
        elif fault.kind in DEADLY:
            if fault.kind == "lose":
                self._lost.add(fault.target)
            member.docker.kill(signal="SIGKILL")
        elif fault.kind == "stop":
            member.docker.pause()
        else:
            self._fleet.leave(fault.target)
        return pid

    def _alive(self, name: str) -> int:
        """The process of a member, which has to run."""

        def pid() -> int:
            docker = self._fleet.members[name].docker
            docker.reload()
            return int(docker.attrs["State"]["Pid"]) if docker.status == "running" else 0

        until(f"{name} alive", pid)
        return pid()

    def heal(self, fault: Fault, pid: int) -> None:
        del pid
        if fault.kind == "stop":
            self._fleet.members[fault.target].docker.unpause()
        elif fault.kind == "part":
            self._fleet.come_back(fault.target)
        else:
            self._links.set(fault.target, "none")

    def recovered(self, name: str, pid: int, since: float) -> float | None:
        """As the links tell. The engine starts nobody again who was killed by its means."""
        del pid
        member = self._fleet.members[name]
        member.docker.wait(timeout=RECOVERY_S)
        if name in self._lost:
            self._lost.remove(name)
            self._fleet.replace(name)
        else:
            self._fleet.start(name)
        return self._links.recovered(name, since, timeout_s=_RECOVERED_S)


@contextlib.contextmanager
def containers(parent: Path) -> Generator[ContainerStack]:
    """A stack whose run lies in a folder of its own, with an engine; nothing of it runs at the end.

    Raises NoEngineError where there is no engine, and NoImageError where images cannot be had.
    """
    with container_engine.running() as client:
        container_images.build(client, *container_images.OURS, revision=revision())
        container_images.provide(client, "redis:7", "nats:2")
        with tormented(parent / "work", client) as stack:
            yield stack


@contextlib.contextmanager
def tormented(work: Path, client: Any) -> Generator[ContainerStack]:
    """The same on an engine that has the images."""
    links = {ends: _link(ends, port) for port, ends in enumerate(_ALL, start=_FIRST_PORT)}
    carried, ledger, bell = [*links.values()], links[LEDGER], links[BELL]
    fleet = Fleet(
        work,
        client,
        *(links[ends].override for ends in ENDS),
        f"experience.ledger={{name: redis, durability: host, url: 'redis://{ledger.listen}/0'}}",
        f"run.doorbell={{name: nats, url: 'nats://{bell.listen}'}}",
        node=links[SIDECAR].listen,
    )
    means = Means(
        links=[each.name for each in carried],
        unframed=[ledger.name, bell.name],
        forgetful=[name for name in fleet.members if name != _REMEMBERS],
        drains=True,
        parts=True,
    )
    with fleet.laid_out():
        proxy = ProxyContainer(fleet, carried)
        try:
            yield ContainerStack(fleet, Links(carried, proxy), means)
        finally:
            proxy.stop()


def _link(ends: tuple[str, str], port: int) -> Link:
    caller, called = ends
    return Link(caller, called, f"{LINKS}:{port}", f"{called}:{_PORTS[called]}")
