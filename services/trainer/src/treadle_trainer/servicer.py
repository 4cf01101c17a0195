"""TrainerService: what the trainer says of itself."""

from collections.abc import Callable
from typing import Any

from treadle.trainer.v1 import trainer_service_pb2 as pb
from treadle.trainer.v1 import trainer_service_pb2_grpc as rpc
from treadle_trainer import wire
from treadle_trainer.core.status import TrainerStatus

SERVICE = "treadle.trainer.v1.TrainerService"


class TrainerServicer(rpc.TrainerServiceServicer):
    """Answers from a function that says what the trainer does now."""

    def __init__(self, status: Callable[[], TrainerStatus]) -> None:
        self._status = status

    async def GetTrainer(
        self,
        request: pb.GetTrainerRequest,
        context: Any,
    ) -> pb.GetTrainerResponse:
        return wire.status_to_wire(self._status())
