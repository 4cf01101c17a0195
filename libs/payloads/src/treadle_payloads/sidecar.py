"""Runs the sidecar of a node: `python -m treadle_payloads.sidecar --config FILE`."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from pydantic import Field

from treadle_payloads.ray_cluster import RayConfig
from treadle_payloads.ray_sidecar import keep_owner
from treadle_payloads.servicer import SERVICE_NAME, PayloadServicer
from treadle_payloads.spool import PIN_S, Spool
from treadle_payloads.sweeper import Sweeper
from treadle_payloads.upload_server import Uploads, checked_path
from treadle_runtime import config, server
from treadle_runtime.channel import connect
from treadle_runtime.config import ServiceConfig
from treadle_runtime.tracker import Tracker, of_service

REPORT_S = 5.0
"""Seconds between rows of metrics."""


class SidecarConfig(ServiceConfig):
    """What one node keeps of a run's payloads."""

    node: str = ""
    """Address by which others reach `listen`, as references name it; `listen` itself if empty."""
    upload: Path
    """Unix socket for those who upload."""
    directory: Path | None = None
    """The spool; `payloads` in the run's directory when absent."""
    archive: Path | None = None
    """Directory that an upload also lies in before it is acknowledged."""
    budget_bytes: int = Field(default=64 * 2**30, ge=1)
    """Most bytes of payloads that the node keeps; who uploads more is told to come again."""
    pin_s: float = Field(default=PIN_S, gt=0, allow_inf_nan=False)
    """Seconds for which an upload is kept that the ledger does not hear of."""
    ray: RayConfig | None = None
    """Cluster whose object store readers on other nodes are served from; absent: by streams."""
    experience_address: str = ""
    """Where the ledger is asked what may go; empty: nothing goes unless it is released."""


async def main(settings: SidecarConfig) -> None:
    """Serves until the process is told to stop."""
    # Before the spool: who stands by must not begin an epoch.
    await server.claim(settings.listen, insecure_dev=settings.run.insecure_dev)
    spool = await asyncio.to_thread(
        Spool,
        settings.directory or settings.run.dir / "payloads",
        budget_bytes=settings.budget_bytes,
        archive=settings.archive,
        pin_s=settings.pin_s,
    )
    uploads = Uploads(spool, settings.run.id, checked_path(settings.upload))
    tracker = of_service(settings.run, "payloads")
    beside: list[Callable[[], Awaitable[None]]] = [uploads.serve, partial(_report, spool, tracker)]
    if settings.ray:
        ray = RayConfig.of(settings.ray, settings.run.id)
        beside.append(
            partial(keep_owner, ray, settings.node or settings.listen, spool.files.directory)
        )
    async with AsyncExitStack() as stack:
        if settings.experience_address:
            channel = await stack.enter_async_context(connect(settings.experience_address))
            beside.append(Sweeper(spool, channel, settings.run.id).run)
        await server.serve(
            server.Service(
                name="payload",
                listen=settings.listen,
                insecure_dev=settings.run.insecure_dev,
                register=PayloadServicer(spool, settings.run.id).register,
                proto_services=(SERVICE_NAME,),
                background=tuple(beside),
            )
        )


async def _report(spool: Spool, tracker: Tracker) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        tracker.log("payloads", _row(spool))


def _row(spool: Spool) -> dict[str, float]:
    return {"used_bytes": spool.used_bytes, "objects": spool.objects, "epoch": spool.epoch}


def run() -> None:
    """Entry of the command `treadle-payloads`."""
    settings = config.load(SidecarConfig)
    server.run(settings, "payloads", partial(main, settings))


if __name__ == "__main__":
    run()
