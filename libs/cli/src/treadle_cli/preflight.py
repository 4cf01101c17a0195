"""What a run needs of its host, looked at before any process is started."""

import errno
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from urllib.parse import urlsplit

from treadle_runtime.local_servers.server import LocalServer

_CHECKPOINT = 3
"""Size of a checkpoint in sizes of its policy: the parameters and two moments of the optimiser."""
_MB = 1e6
_REACH_S = 2.0
_PORTS = {"redis": 6379, "rediss": 6379, "nats": 4222, "tls": 4222}
"""Of an address that names none, by its scheme."""


def check(directory: Path, model: Path) -> list[str]:
    """Says what the run's directory lacks, a line each; creates it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=directory) as file:
            file.write(b"\0")
    except OSError as error:
        return [f"run.dir: nothing can be written in {directory}: {error.strerror}"]
    return room(directory, model)


def room(directory: Path, model: Path) -> list[str]:
    """Says what the run's disk lacks, a line; reads only."""
    policy = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    kept = any((directory / "checkpoints").glob("step-*"))
    count = 1 if kept else 2  # one that is kept makes room when the next is committed
    needed, free = count * _CHECKPOINT * policy, shutil.disk_usage(directory).free
    if free >= needed:
        return []
    return [
        f"run.dir: {needed / _MB:.1f} MB are needed in {directory}, {count} x {_CHECKPOINT} x "
        f"{policy / _MB:.1f} MB of run.model for checkpoints; {free / _MB:.1f} MB are free"
    ]


def surroundings(
    services: Mapping[str, Mapping[str, Any]], own: Sequence[LocalServer]
) -> list[str]:
    """Says which ports are taken, and which servers are not there, a line each.

    `own` are those that are started with the services.
    """
    started = {server.address for server in own}
    found = [line for server in own for line in server.check()]
    for key, url in _servers(services):
        if url not in started and (why := _unreachable(url)):
            found.append(f"{key}: nothing answers at {url}: {why}; start it, or leave the key out")
    for name, told in services.items():
        if why := _taken(told["listen"]):
            found.append(f"{name}.listen: {told['listen']} cannot be listened on: {why}")
    found += _gateway(services["rollout"].get("gateway") or {}) if "rollout" in services else []
    return found


def _gateway(told: Mapping[str, Any]) -> Iterator[str]:
    """Ports of the gateway's workers that are taken."""
    host, first = told.get("host", "127.0.0.1"), told.get("port", 0)
    where = f"[{host}]" if ":" in host else host
    for port in range(first, first + told.get("workers", 1)) if first else ():
        if why := _taken(f"{where}:{port}"):
            yield f"rollout.gateway.port: {where}:{port} cannot be listened on: {why}"


def _servers(services: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Keys and addresses of the servers that the services are told to use."""
    experience = services["experience"]
    chosen = {
        "run.doorbell.url": experience["run"].get("doorbell"),
        "experience.ledger.url": experience.get("ledger"),
    }
    for key, plugin in chosen.items():
        if plugin and plugin.get("url"):
            yield key, str(plugin["url"])


def _unreachable(url: str) -> str:
    """Why no connection can be made; empty where one can, or nobody here can tell."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(_REACH_S)
                client.connect(parts.path)
        elif parts.scheme in _PORTS:
            where = (parts.hostname or "localhost", parts.port or _PORTS[parts.scheme])
            socket.create_connection(where, timeout=_REACH_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _taken(listen: str) -> str:
    """Why a host's port cannot be listened on; who holds a unix socket is stood by for."""
    host, _, port = listen.rpartition(":")
    if listen.startswith("unix:") or not port.isdigit():
        return ""
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            return error.strerror or ""
    return ""
