"""RolloutService: what the replica does now, and its episodes for clients who play them."""

from collections.abc import Callable
from typing import Any

from treadle.rollout.v1 import rollout_service_pb2 as pb
from treadle.rollout.v1.rollout_service_pb2_grpc import RolloutServiceServicer
from treadle_core.ids import checked_id
from treadle_rollout import wire
from treadle_rollout.adapters.gateway_sessions import GatewaySessions
from treadle_rollout.core.errors import NoEpisodeError, NoGatewayError
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.ports import Engine

MAX_WAIT_S = 60.0
"""Longest that OpenSession waits for an episode."""


class RolloutServicer(RolloutServiceServicer):
    """Answers from the state that the loops keep."""

    def __init__(
        self,
        replica_id: str,
        state: ReplicaState,
        engine: Engine,
        clock: Callable[[], float],
        offers: GatewaySessions | None = None,
    ) -> None:
        """`offers` is where clients take episodes; None where they are played here."""
        self._replica_id = replica_id
        self._state = state
        self._engine = engine
        self._clock = clock
        self._offers = offers

    async def GetReplica(
        self, request: pb.GetReplicaRequest, context: Any
    ) -> pb.GetReplicaResponse:
        return wire.replica_to_wire(
            self._replica_id,
            self._state,
            served_version=self._engine.served_version,
            now=self._clock(),
        )

    async def OpenSession(
        self, request: pb.OpenSessionRequest, context: Any
    ) -> pb.OpenSessionResponse:
        wait_s = min(request.wait.ToTimedelta().total_seconds(), MAX_WAIT_S)
        taken = await self._sessions.take(checked_id("request_id", request.request_id), wait_s)
        if taken is None:
            raise NoEpisodeError
        return wire.session_to_wire(*taken, model_name=self._sessions.model_name)

    async def EndSession(
        self, request: pb.EndSessionRequest, context: Any
    ) -> pb.EndSessionResponse:
        self._sessions.report(request.session, request.token, wire.outcome_from_wire(request))
        return pb.EndSessionResponse()

    @property
    def _sessions(self) -> GatewaySessions:
        if self._offers is None:
            raise NoGatewayError
        return self._offers
