"""Refit over gRPC."""

from collections.abc import Mapping
from functools import partial

import grpc.aio

from treadle.refit.v1 import refit_service_pb2 as pb
from treadle.refit.v1 import refit_service_pb2_grpc as rpc
from treadle_runtime.channel import call
from treadle_trainer import wire
from treadle_trainer.ports import OpenedVersion, SentVersion
from treadle_weights.layouts import Layout
from treadle_weights.wire import arena_from_wire, digests_to_wire, layout_to_wire

TIMEOUT_S = 15.0
"""Of one try, beyond what the peer may wait."""
SEND_TIMEOUT_S = 120.0
"""Of one try at sending, which waits for engines to verify."""
AWAY_S = 60.0
"""How long a peer may be away before a call fails. One that has no room is waited for."""

_call = partial(call, budget_s=AWAY_S, patient=True)


class RefitClient:
    """Refit of one run, on a channel. Raises RemoteError."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str) -> None:
        self._stub = rpc.RefitServiceStub(channel)
        self._run_id = run_id

    async def open_version(
        self,
        *,
        trainer_epoch: int,
        step: int,
        request_id: str,
        layout: Layout,
        trace_id: str,
        alias_of: int,
        weights_digest: str,
    ) -> OpenedVersion:
        request = pb.OpenVersionRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            step=step,
            request_id=request_id,
            layout=layout_to_wire(layout),
            trace_id=trace_id,
            alias_of=alias_of,
            weights_digest=weights_digest,
        )
        answer = await _call(self._stub.OpenVersion, request, timeout_s=TIMEOUT_S)
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
        answer = await _call(self._stub.SendVersion, request, timeout_s=SEND_TIMEOUT_S)
        return SentVersion(answer.members, answer.left_behind)

    async def await_demand(self, *, published_version: int, wait_s: float) -> bool:
        request = pb.AwaitDemandRequest(
            run_id=self._run_id,
            published_version=published_version,
            wait=wire.duration(wait_s),
        )
        timeout_s = TIMEOUT_S + wait_s
        answer = await _call(self._stub.AwaitDemand, request, timeout_s=timeout_s)
        return bool(answer.wanted)
