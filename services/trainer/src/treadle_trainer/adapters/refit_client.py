"""Refit over gRPC."""

from collections.abc import Mapping

import grpc.aio

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle.refit.v1 import refit_service_pb2_grpc as rpc
from treadle_runtime.fields import duration
from treadle_trainer.adapters.peers import ask
from treadle_trainer.ports import NewVersion, OpenedVersion, SentVersion
from treadle_weights.wire import arena_from_wire, digests_to_wire, layout_to_wire

VERIFY_S = 105.0
"""How long engines may take to verify a version."""


class RefitClient:
    """Refit of one run, on a channel. Raises RemoteError."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str) -> None:
        self._stub = rpc.RefitServiceStub(channel)
        self._run_id = run_id

    async def open_version(self, new: NewVersion) -> OpenedVersion:
        request = pb.OpenVersionRequest(
            run_id=self._run_id,
            trainer_epoch=new.trainer_epoch,
            step=new.step,
            request_id=new.request_id,
            layout=layout_to_wire(new.layout),
            trace_id=new.trace_id,
            alias_of=new.alias_of,
            weights_digest=new.weights_digest,
        )
        answer = await ask(self._stub.OpenVersion, request)
        return OpenedVersion(answer.version, arena_from_wire(answer.arena), answer.aliased)

    async def send_version(
        self, *, trainer_epoch: int, version: int, digests: Mapping[str, int]
    ) -> SentVersion:
        request = pb.SendVersionRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            version=version,
            digests=digests_to_wire(digests),
        )
        answer = await ask(self._stub.SendVersion, request, wait_s=VERIFY_S)
        return SentVersion(answer.members, answer.left_behind)

    async def await_demand(self, *, published_version: int, wait_s: float) -> bool:
        request = pb.AwaitDemandRequest(
            run_id=self._run_id,
            published_version=published_version,
            wait=duration(wait_s),
        )
        answer = await ask(self._stub.AwaitDemand, request, wait_s=wait_s)
        return bool(answer.wanted)
