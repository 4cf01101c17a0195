"""RolloutService: what the replica does now."""

from collections.abc import Callable
from typing import Any

from treadle.rollout.v1 import rollout_service_pb2 as pb
from treadle.rollout.v1.rollout_service_pb2_grpc import RolloutServiceServicer
from treadle_rollout import wire
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.ports import Engine


class RolloutServicer(RolloutServiceServicer):
    """Answers from the state that the loops keep."""

    def __init__(
        self, replica_id: str, state: ReplicaState, engine: Engine, clock: Callable[[], float]
    ) -> None:
        self._replica_id = replica_id
        self._state = state
        self._engine = engine
        self._clock = clock

    async def GetReplica(
        self, request: pb.GetReplicaRequest, context: Any
    ) -> pb.GetReplicaResponse:
        return wire.replica_to_wire(
            self._replica_id,
            self._state,
            served_version=self._engine.served_version,
            now=self._clock(),
        )
