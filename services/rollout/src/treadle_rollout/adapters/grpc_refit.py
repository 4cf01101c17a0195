"""Refit over gRPC: the real fleet."""

from functools import partial

import grpc.aio

from treadle.refit.v1.refit_service_pb2_grpc import RefitServiceStub
from treadle_rollout import wire
from treadle_rollout.ports import Membership, Order
from treadle_runtime.channel import call
from treadle_runtime.doorbell import Doorbell, Topic, ask_until
from treadle_weights.layouts import Layout

TIMEOUT_S = 10.0
"""Of a call, beyond what it waits on purpose."""


class GrpcRefit:
    """Refit at the other end of a channel."""

    def __init__(
        self, channel: grpc.aio.Channel, run_id: str, engine_id: str, bell: Doorbell
    ) -> None:
        """`bell` hears of versions."""
        self._stub = RefitServiceStub(channel)
        self._run_id = run_id
        self._engine_id = engine_id
        self._bell = bell

    async def attend(self, member: Membership, layout: Layout, *, wait_s: float) -> Order | None:
        return await ask_until(
            self._bell,
            Topic.VERSIONS,
            partial(self._attend, member, layout),
            lambda order: order is not None,
            wait_s=wait_s,
        )

    async def _attend(self, member: Membership, layout: Layout, wait_s: float) -> Order | None:
        request = wire.membership_to_wire(self._run_id, self._engine_id, member, layout, wait_s)
        response = await call(self._stub.Attend, request, timeout_s=TIMEOUT_S + wait_s)
        return wire.order_from_wire(response)
