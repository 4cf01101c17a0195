"""A service for tests: serves health, and does as its arguments say."""

import asyncio
import sys
from pathlib import Path

from treadle_runtime.config import RunConfig, ServiceConfig
from treadle_runtime.server import Service, run, serve

listen, does, mark = sys.argv[1:]


async def work() -> None:
    if does == "fail":
        raise ValueError("the work failed")
    if does == "run":
        await asyncio.sleep(3600)


async def drain() -> None:
    await asyncio.to_thread(Path(mark).write_text, "drained")


async def main() -> None:
    await serve(
        Service(
            name="lone",
            listen=listen,
            register=lambda server: None,
            proto_services=("treadle.lone.v1.LoneService",),
            background=(work,),
            drain=drain,
        )
    )


run(
    ServiceConfig(run=RunConfig(id="r", dir=Path(), model=Path()), listen="unix:unused"),
    "lone",
    main,
)
