"""The sidecar's part in Ray: a child that keeps the owner of its node's payloads alive."""

import asyncio
import logging
import sys
from pathlib import Path

from treadle_payloads.ray_cluster import END, RayConfig, child_environment

AGAIN_S = 5.0
"""Between the end of a child and the start of the next: the cluster may not be there yet."""

_END_S = 15.0
_log = logging.getLogger(__name__)


def command(config: RayConfig, node: str, directory: Path, *, ray_node: str = "") -> list[str]:
    """What keeps an owner for the spool `directory` of the sidecar at `node`: a tender.

    `ray_node` is the id of a Ray node other than the one that this host joins.
    """
    return [
        *(sys.executable, "-m", "treadle_payloads.ray_tender", *config.arguments()),
        *("--bytes", str(config.bytes), "--node", node, "--directory", str(directory)),
        *("--ray-node", ray_node),
    ]


async def keep_owner(config: RayConfig, node: str, directory: Path) -> None:
    """Keeps the owner until it is cancelled, then ends it."""
    environment = dict(child_environment(config.address))
    while True:
        child = await asyncio.create_subprocess_exec(
            *command(config, node, directory), env=environment, stdin=asyncio.subprocess.PIPE
        )
        try:
            await child.wait()
        except asyncio.CancelledError:
            await _end(child)
            raise
        _log.warning(
            "Ray at %s: the owner's keeper ended with %s", config.address, child.returncode
        )
        await asyncio.sleep(AGAIN_S)


async def _end(child: asyncio.subprocess.Process) -> None:
    if child.stdin:
        child.stdin.write(END)
        child.stdin.close()
    try:
        await asyncio.wait_for(child.wait(), _END_S)
    except TimeoutError:
        child.kill()
        await child.wait()
