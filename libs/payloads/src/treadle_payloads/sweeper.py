"""Finds what nobody needs: uploads that were never reported, and what a lost release left."""

import asyncio
import logging
from dataclasses import dataclass
from itertools import islice
from typing import Any

import grpc.aio

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1.experience_service_pb2_grpc import ExperienceServiceStub
from treadle_core.errors import TreadleError
from treadle_payloads.spool import Spool
from treadle_payloads.store import Stay
from treadle_runtime.channel import call

log = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0
SHORTEST_PAUSE_S = 0.5
_CALL_S = 10.0
_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Sweeper:
    """Asks the ledger what of a spool may go; the ledger is the only one who knows."""

    spool: Spool
    channel: grpc.aio.Channel
    run_id: str

    async def run(self) -> None:
        """Sweeps now and then, forever."""
        pause_s = min(max(self.spool.pin_s / 4, SHORTEST_PAUSE_S), LONGEST_PAUSE_S)
        while True:
            await asyncio.sleep(pause_s)
            try:
                swept = await self.sweep()
            except TreadleError as error:
                log.warning("what nobody needs is swept later: %s", error.message)
            else:
                if swept:
                    log.info("%d payloads that nobody needs are gone", swept)

    async def sweep(self) -> int:
        """How many objects went. Raises what the ledger answers, or that it is away."""
        stays, swept = iter(self.spool.idle()), 0
        while page := await asyncio.to_thread(lambda: list(islice(stays, _AT_ONCE))):
            by_key = {stay.sha256: stay for stay in page}
            request = pb.CheckPayloadsRequest(run_id=self.run_id, sha256s=by_key)
            method: Any = ExperienceServiceStub(self.channel).CheckPayloads
            answer = await call(method, request, timeout_s=_CALL_S)
            unneeded = [by_key[key] for key in answer.unneeded if key in by_key]
            swept += await asyncio.to_thread(self._drop, unneeded, answer.writer_epoch)
        return swept

    def _drop(self, stays: list[Stay], writer_epoch: int) -> int:
        return sum(self.spool.drop(stay, writer_epoch=writer_epoch) for stay in stays)
