"""VersionLedger over the experience service."""

import grpc.aio

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_refit.ports import Committed
from treadle_runtime.channel import call

_TRY_S = 5.0
_BUDGET_S = 10.0
"""How long a ledger that restarts is waited for; every call is keyed or a read."""


class ExperienceLedger:
    """The versions of one run, as its experience service keeps them."""

    def __init__(self, run_id: str, channel: grpc.aio.Channel) -> None:
        self._run_id = run_id
        self._stub = rpc.ExperienceServiceStub(channel)

    async def newest_committed(self) -> Committed:
        request = pb.GetRunRequest(run_id=self._run_id)
        response: pb.GetRunResponse = await call(
            self._stub.GetRun, request, timeout_s=_TRY_S, budget_s=_BUDGET_S
        )
        return Committed(response.version, response.version_digest)

    async def announce(
        self, *, trainer_epoch: int, step: int, request_id: str, trace_id: str
    ) -> int:
        request = pb.AnnounceVersionRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            step=step,
            request_id=request_id,
            trace_id=trace_id,
        )
        response: pb.AnnounceVersionResponse = await call(
            self._stub.AnnounceVersion, request, timeout_s=_TRY_S, budget_s=_BUDGET_S
        )
        return response.version

    async def commit(self, *, trainer_epoch: int, version: int, weights_digest: str) -> None:
        request = pb.CommitVersionRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            version=version,
            weights_digest=weights_digest,
        )
        await call(self._stub.CommitVersion, request, timeout_s=_TRY_S, budget_s=_BUDGET_S)

    async def abort(self, *, version: int, message: str) -> None:
        request = pb.AbortVersionRequest(run_id=self._run_id, version=version, message=message)
        await call(self._stub.AbortVersion, request, timeout_s=_TRY_S, budget_s=_BUDGET_S)
