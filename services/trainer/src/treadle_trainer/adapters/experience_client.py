"""Experience over gRPC."""

from collections.abc import Mapping, Sequence
from functools import partial

import grpc.aio

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_runtime.channel import call
from treadle_trainer import wire
from treadle_trainer.core.claims import Claim, Fault
from treadle_trainer.ports import Acquired, Checkpoint, RunView

TIMEOUT_S = 15.0
"""Of one try, beyond what the peer may wait."""
AWAY_S = 60.0
"""How long a peer may be away before a call fails. One that has no room is waited for."""

_call = partial(call, budget_s=AWAY_S, patient=True)


class ExperienceClient:
    """Experience of one run, on a channel. Raises RemoteError."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str) -> None:
        self._stub = rpc.ExperienceServiceStub(channel)
        self._run_id = run_id

    async def get_run(self, *, after: int, wait_s: float) -> RunView:
        request = pb.GetRunRequest(run_id=self._run_id, after=after, wait=wire.duration(wait_s))
        timeout_s = TIMEOUT_S + wait_s
        answer = await _call(self._stub.GetRun, request, timeout_s=timeout_s)
        return wire.run_from_wire(answer)

    async def acquire(self, *, holder: str, checkpoint_digest: str) -> Acquired:
        request = pb.AcquireRunRequest(
            run_id=self._run_id, holder=holder, checkpoint_digest=checkpoint_digest
        )
        answer = await _call(self._stub.AcquireRun, request, timeout_s=TIMEOUT_S)
        return Acquired(answer.trainer_epoch, answer.step)

    async def claim(self, *, trainer_epoch: int, step: int, wait_s: float) -> Claim:
        request = pb.ClaimStepRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            step=step,
            wait=wire.duration(wait_s),
        )
        timeout_s = TIMEOUT_S + wait_s
        answer = await _call(self._stub.ClaimStep, request, timeout_s=timeout_s)
        return wire.claim_from_wire(answer)

    async def hand_back(self, *, trainer_epoch: int, step: int, faults: Sequence[Fault]) -> None:
        request = pb.HandBackStepRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            step=step,
            faults=map(wire.fault_to_wire, faults),
        )
        await _call(self._stub.HandBackStep, request, timeout_s=TIMEOUT_S)

    async def report(
        self, *, trainer_epoch: int, step: int, metrics: Mapping[str, float], trace_id: str
    ) -> bool:
        request = pb.ReportStepRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            step=step,
            metrics=metrics,
            trace_id=trace_id,
        )
        answer = await _call(self._stub.ReportStep, request, timeout_s=TIMEOUT_S)
        return bool(answer.checkpoint_now)

    async def commit(self, *, trainer_epoch: int, checkpoint: Checkpoint) -> Sequence[Checkpoint]:
        request = pb.CommitCheckpointRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            digest=checkpoint.digest,
            parent_digest=checkpoint.parent_digest,
            step=checkpoint.step,
            path=checkpoint.path,
        )
        answer = await _call(self._stub.CommitCheckpoint, request, timeout_s=TIMEOUT_S)
        return wire.checkpoints_from_wire(answer.retained)
