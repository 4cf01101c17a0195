"""Starts the refit service: `python -m treadle_refit.main --config FILE`."""

import time
from functools import partial

from treadle_refit.adapters.experience import ExperienceLedger
from treadle_refit.config import RefitConfig
from treadle_refit.reconciler import Limits, Reconciler
from treadle_refit.servicer import SERVICE_NAME, RefitServicer
from treadle_runtime import config, doorbell, server
from treadle_runtime.channel import connect
from treadle_runtime.doorbell import Topic
from treadle_runtime.plugins import build
from treadle_runtime.tracker import of_service


async def main(settings: RefitConfig) -> None:
    """Serves the run until the process is told to stop."""
    limits = Limits(
        verify_timeout_s=settings.verify_timeout_s,
        send_timeout_s=settings.send_timeout_s,
        dead_after_s=settings.dead_after_s,
    )
    async with (
        connect(settings.experience_address) as channel,
        doorbell.of_run(settings.run) as bell,
    ):
        reconciler = Reconciler(
            settings.run.id,
            limits,
            ledger=ExperienceLedger(settings.run.id, channel),
            transport=build(
                "treadle.weight_transports", settings.transport, run_dir=settings.run.dir
            ),
            tracker=of_service(settings.run, "refit"),
            clock=time.monotonic,
            on_news=partial(bell.ring, Topic.VERSIONS),
        )
        await server.serve(
            server.Service(
                name="refit",
                listen=settings.listen,
                insecure_dev=settings.run.insecure_dev,
                register=RefitServicer(settings.run.id, reconciler).register,
                proto_services=(SERVICE_NAME,),
                background=(reconciler.watch,),
                drain=reconciler.close,
            )
        )


if __name__ == "__main__":
    settings = config.load(RefitConfig)
    server.run(settings, "refit", partial(main, settings))
