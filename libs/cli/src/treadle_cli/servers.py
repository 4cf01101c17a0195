"""The servers that a run is to have of its own: those that its recipe needs and gives no address.

They start before the services and end after them.
"""

import asyncio
from pathlib import Path
from typing import Any, cast

from treadle_runtime.local_servers.known import READY_S, last_line
from treadle_runtime.local_servers.nats import NatsServer
from treadle_runtime.local_servers.ray import RayServer
from treadle_runtime.local_servers.redis import RedisServer
from treadle_runtime.local_servers.server import LOG, LocalServer, LocalServerError
from treadle_runtime.supervisor import ChildSpec


def of_run(directory: Path, run: dict[str, Any]) -> tuple[LocalServer, ...]:
    """Those of all services, in the order in which they end.

    Writes their addresses into `run`, what services are told of the run.
    """
    servers: list[LocalServer] = []
    payloads: dict[str, Any] = run["payloads"]
    ray: Any = payloads.get("ray")
    if isinstance(ray, dict) and not cast("dict[str, Any]", ray).get("address"):
        servers.append(RayServer.of(directory))
        told = cast("dict[str, Any]", ray) | {"address": servers[-1].address}
        run["payloads"] = payloads | {"ray": told}
    bell: dict[str, Any] = run["doorbell"]
    if bell["name"] == "nats" and not bell.get("url"):
        servers.append(NatsServer.of(directory))
        run["doorbell"] = bell | {"url": servers[-1].address}
    return tuple(servers)


def of_ledger(directory: Path, experience: dict[str, Any]) -> tuple[LocalServer, ...]:
    """That of the ledger, whose address is written into `experience`, what its service is told."""
    ledger: Any = experience.get("ledger")
    told = cast("dict[str, Any]", ledger) if isinstance(ledger, dict) else {}
    if told.get("name") != "redis" or told.get("url"):
        return ()
    server = RedisServer.of(directory, durability=str(told.get("durability")))
    experience["ledger"] = told | {"url": server.address}
    return (server,)


def child(server: LocalServer) -> ChildSpec:
    """How a supervisor runs it."""
    return ChildSpec(
        name=server.name,
        command=server.command(),
        log_path=server.directory / LOG,
        answers=server.is_ready,
        serves=True,
    )


async def until_ready(servers: tuple[LocalServer, ...]) -> None:
    """Returns when all answer. Raises LocalServerError for one that does not in time."""
    for server in servers:
        if not await asyncio.to_thread(server.wait_until_ready, READY_S):
            raise LocalServerError(
                f"{server.name} does not answer after {READY_S:.0f} s: {last_line(server)}"
            )
