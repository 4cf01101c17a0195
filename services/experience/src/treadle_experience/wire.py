"""Values of the core as messages of the contract."""

import json
from collections.abc import Iterable

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle_core.tickets import Ticket
from treadle_experience.core.preview import PreviewedStep
from treadle_experience.core.state import (
    Attempt,
    Checkpoint,
    Episode,
    EvaluationKey,
    Outcome,
    Result,
)
from treadle_experience.core.steps import Claim, ClaimedTask
from treadle_experience.core.summary import Summary
from treadle_payloads.media import medium_to_wire
from treadle_payloads.outcomes import TERMINATIONS
from treadle_runtime.fields import duration


def ticket(value: Ticket) -> pb.Ticket:
    return pb.Ticket(
        episode_id=value.episode_id,
        attempt=value.attempt,
        task_id=value.task_id,
        index=value.index,
        spec_json=json.dumps(value.spec, separators=(",", ":"), allow_nan=False).encode(),
        temperature=value.sampling.temperature,
        max_tokens=value.sampling.max_tokens,
        deadline=duration(value.deadline_s),
        evaluation=value.evaluation,
    )


def attempts(values: Iterable[Attempt]) -> list[pb.Attempt]:
    return [pb.Attempt(episode_id=value.episode_id, attempt=value.attempt) for value in values]


def claim(value: Claim) -> pb.ClaimStepResponse:
    return pb.ClaimStepResponse(
        tasks=map(claimed_task, value.tasks), complete=value.complete, last=value.last
    )


def previewed(value: PreviewedStep) -> pb.PreviewedStep:
    """Without inline bytes: the claim brings them."""
    message = pb.PreviewedStep(
        step=value.step, tasks=map(claimed_task, value.tasks), ready=value.ready
    )
    for task in message.tasks:
        for episode in task.episodes:
            if episode.result.payload.HasField("inline"):
                episode.result.payload.inline = b""
    return message


def checkpoint(value: Checkpoint) -> pb.Checkpoint:
    return pb.Checkpoint(
        digest=value.digest,
        parent_digest=value.parent_digest,
        step=value.step,
        path=value.path,
    )


def summary(value: Summary, durability: str) -> pb.GetRunResponse:
    return pb.GetRunResponse(
        durability=durability,
        position=value.position,
        checkpoints=map(checkpoint, value.checkpoints),
        tasks=value.tasks,
        episodes=value.episodes,
        trained_step=value.trained_step,
        version=value.version,
        version_step=value.version_step,
        version_digest=value.version_digest,
        evaluations=[_evaluation(key, outcome) for key, outcome in value.evaluations],
        complete=value.complete,
        failures=value.failures,
        last_step=value.last_step,
        reasons=value.reasons,
        lost_payloads=value.lost_payloads,
        window_lag=value.window_lag,
    )


def _evaluation(key: EvaluationKey, outcome: Outcome) -> pb.Evaluation:
    return pb.Evaluation(
        name=key.name,
        step=key.step,
        score=outcome.score,
        num_scored=outcome.num_scored,
        num_failed=outcome.num_failed,
        oldest_version=outcome.oldest_version,
        newest_version=outcome.newest_version,
    )


def claimed_task(value: ClaimedTask) -> pb.ClaimedTask:
    return pb.ClaimedTask(
        task_id=value.task_id,
        episodes=[_claimed_episode(episode, step) for episode, step in value.episodes],
    )


def _claimed_episode(episode: Episode, oldest_step: int) -> pb.ClaimedEpisode:
    return pb.ClaimedEpisode(
        episode_id=episode.episode_id,
        attempt=episode.attempt,
        index=episode.index,
        result=_result(episode.result, episode.inline) if episode.result else None,
        oldest_step=oldest_step,
    )


def _result(value: Result, inline: bytes | None) -> episode_pb2.EpisodeResult:
    return episode_pb2.EpisodeResult(
        reward=value.reward,
        termination=TERMINATIONS[value.termination],
        metrics=value.metrics,
        turn_rewards=value.turn_rewards,
        num_tokens=value.num_tokens,
        num_trained=value.num_trained,
        versions=value.versions,
        traceparent=value.traceparent,
        payload=episode_pb2.Payload(
            sha256=value.sha256,
            size=value.size,
            inline=inline,
            node=value.node,
            epoch=value.node_epoch,
        ),
        media=map(medium_to_wire, value.media),
    )
