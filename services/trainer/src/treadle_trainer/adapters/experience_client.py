"""Experience over gRPC."""

from collections.abc import Mapping, Sequence
from functools import partial

import grpc.aio

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_core.faults import Fault
from treadle_runtime.doorbell import Doorbell, Topic, ask_until
from treadle_runtime.fields import duration
from treadle_trainer import wire
from treadle_trainer.adapters.peers import ask
from treadle_trainer.core.claims import Claim, ComingStep
from treadle_trainer.ports import Checkpoint, RunView


class ExperienceClient:
    """Experience of one run, on a channel. Raises RemoteError."""

    def __init__(self, channel: grpc.aio.Channel, run_id: str, bell: Doorbell) -> None:
        """`bell` hears of batches."""
        self._stub = rpc.ExperienceServiceStub(channel)
        self._run_id = run_id
        self._bell = bell

    async def get_run(self, *, after: int, wait_s: float) -> RunView:
        return await ask_until(
            self._bell,
            Topic.BATCHES,
            partial(self._get_run, after),
            lambda run: run.position > after,
            wait_s=wait_s,
        )

    async def _get_run(self, after: int, wait_s: float) -> RunView:
        request = pb.GetRunRequest(run_id=self._run_id, after=after, wait=duration(wait_s))
        answer = await ask(self._stub.GetRun, request, wait_s=wait_s)
        return wire.run_from_wire(answer)

    async def acquire(self, *, holder: str, checkpoint_digest: str) -> int:
        request = pb.AcquireRunRequest(
            run_id=self._run_id, holder=holder, checkpoint_digest=checkpoint_digest
        )
        answer = await ask(self._stub.AcquireRun, request)
        return int(answer.trainer_epoch)

    async def claim(self, *, trainer_epoch: int, step: int, wait_s: float) -> Claim:
        return await ask_until(
            self._bell,
            Topic.BATCHES,
            partial(self._claim, trainer_epoch, step),
            lambda claim: bool(claim.tasks) or claim.complete,
            wait_s=wait_s,
        )

    async def _claim(self, trainer_epoch: int, step: int, wait_s: float) -> Claim:
        request = pb.ClaimStepRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            step=step,
            wait=duration(wait_s),
        )
        answer = await ask(self._stub.ClaimStep, request, wait_s=wait_s)
        return wire.claim_from_wire(answer)

    async def preview(self, *, max_steps: int) -> Sequence[ComingStep]:
        request = pb.PreviewStepsRequest(run_id=self._run_id, max_steps=max_steps)
        answer = await ask(self._stub.PreviewSteps, request)
        return [wire.coming_from_wire(step) for step in answer.steps]

    async def hand_back(self, *, trainer_epoch: int, step: int, faults: Sequence[Fault]) -> None:
        request = pb.HandBackStepRequest(
            run_id=self._run_id,
            trainer_epoch=trainer_epoch,
            step=step,
            faults=map(wire.fault_to_wire, faults),
        )
        await ask(self._stub.HandBackStep, request)

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
        answer = await ask(self._stub.ReportStep, request)
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
        answer = await ask(self._stub.CommitCheckpoint, request)
        return wire.checkpoints_from_wire(answer.retained)
