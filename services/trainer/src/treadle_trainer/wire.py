"""The contract's messages to the trainer's words and back."""

from collections.abc import Iterable

from treadle.episode.v1 import episode_pb2 as episode_pb
from treadle.experience.v1 import experience_service_pb2 as experience_pb
from treadle.trainer.v1 import trainer_service_pb2 as pb
from treadle_core.errors import InvalidFieldError
from treadle_core.faults import Fault, FaultReason
from treadle_payloads.media import media_from_wire, medium_to_wire
from treadle_payloads.outcomes import TERMINATIONS
from treadle_payloads.store import PayloadReference
from treadle_runtime.fields import known
from treadle_trainer.core.claims import Claim, ClaimedEpisode, ClaimedTask, ComingStep
from treadle_trainer.core.status import Phase, TrainerStatus
from treadle_trainer.ports import Checkpoint, RunView

_REASONS = {
    FaultReason.PAYLOAD_LOST: experience_pb.FAULT_REASON_PAYLOAD_LOST,
    FaultReason.QUARANTINED: experience_pb.FAULT_REASON_QUARANTINED,
}
_PHASES = {
    Phase.STARTING: pb.TRAINER_PHASE_STARTING,
    Phase.CLAIMING: pb.TRAINER_PHASE_CLAIMING,
    Phase.TRAINING: pb.TRAINER_PHASE_TRAINING,
    Phase.CHECKPOINTING: pb.TRAINER_PHASE_CHECKPOINTING,
    Phase.PUBLISHING: pb.TRAINER_PHASE_PUBLISHING,
    Phase.COMPLETE: pb.TRAINER_PHASE_COMPLETE,
}


def claim_from_wire(message: experience_pb.ClaimStepResponse) -> Claim:
    """Raises InvalidFieldError, its field led by the episode's id."""
    return Claim(
        tasks=tuple(
            ClaimedTask(task.task_id, tuple(map(_episode_from_wire, task.episodes)))
            for task in message.tasks
        ),
        complete=message.complete,
        last=message.last,
    )


def _episode_from_wire(message: experience_pb.ClaimedEpisode) -> ClaimedEpisode:
    result = message.result
    termination = known(f"{message.episode_id}.termination", result.termination, TERMINATIONS)
    if message.oldest_step < 0:
        raise InvalidFieldError(
            f"{message.episode_id}.oldest_step", limit=">= 0", value=message.oldest_step
        )
    payload = result.payload
    return ClaimedEpisode(
        episode_id=message.episode_id,
        attempt=message.attempt,
        reward=result.reward if result.HasField("reward") else None,
        termination=termination,
        num_tokens=result.num_tokens,
        num_trained=result.num_trained,
        versions=tuple(result.versions),
        oldest_step=message.oldest_step,
        payload=PayloadReference(payload.sha256, payload.size, payload.node, payload.epoch),
        inline=payload.inline if payload.HasField("inline") else None,
        metrics=dict(result.metrics),
        traceparent=result.traceparent,
        media=media_from_wire(result.media, f"{message.episode_id}.media"),
    )


def coming_from_wire(message: experience_pb.PreviewedStep) -> ComingStep:
    """Raises InvalidFieldError as `claim_from_wire`."""
    claim = experience_pb.ClaimStepResponse(tasks=message.tasks)
    return ComingStep(claim_from_wire(claim), message.ready)


def claim_to_wire(claim: Claim) -> experience_pb.ClaimStepResponse:
    """As `claim_from_wire` reads it."""
    return experience_pb.ClaimStepResponse(
        tasks=[
            experience_pb.ClaimedTask(
                task_id=task.task_id, episodes=map(_episode_to_wire, task.episodes)
            )
            for task in claim.tasks
        ],
        complete=claim.complete,
        last=claim.last,
    )


def _episode_to_wire(episode: ClaimedEpisode) -> experience_pb.ClaimedEpisode:
    payload = episode.payload
    return experience_pb.ClaimedEpisode(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        oldest_step=episode.oldest_step,
        result=episode_pb.EpisodeResult(
            reward=episode.reward,
            termination=TERMINATIONS[episode.termination],
            metrics=episode.metrics,
            num_tokens=episode.num_tokens,
            num_trained=episode.num_trained,
            versions=episode.versions,
            traceparent=episode.traceparent,
            payload=episode_pb.Payload(
                sha256=payload.sha256,
                size=payload.size,
                inline=episode.inline,
                node=payload.node,
                epoch=payload.epoch,
            ),
            media=map(medium_to_wire, episode.media),
        ),
    )


def fault_to_wire(fault: Fault) -> experience_pb.EpisodeFault:
    return experience_pb.EpisodeFault(
        episode_id=fault.episode_id,
        attempt=fault.attempt,
        reason=_REASONS[fault.reason],
        message=fault.message,
    )


def run_from_wire(message: experience_pb.GetRunResponse) -> RunView:
    return RunView(message.position, checkpoints_from_wire(message.checkpoints), message.complete)


def checkpoints_from_wire(
    messages: Iterable[experience_pb.Checkpoint],
) -> tuple[Checkpoint, ...]:
    return tuple(Checkpoint(m.digest, m.parent_digest, m.step, m.path) for m in messages)


def status_to_wire(status: TrainerStatus) -> pb.GetTrainerResponse:
    return pb.GetTrainerResponse(
        trainer_epoch=status.trainer_epoch,
        step=status.step,
        phase=_PHASES[status.phase],
        waited_s=status.waited_s,
        up_s=status.up_s,
    )
