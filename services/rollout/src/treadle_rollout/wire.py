"""Between this service's values and the messages of `treadle.{experience,refit,rollout}.v1`."""

import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as experience_pb
from treadle.refit.v1 import refit_service_pb2 as refit_pb
from treadle.rollout.v1 import rollout_service_pb2 as rollout_pb
from treadle_core.errors import InvalidFieldError
from treadle_core.ids import checked_id
from treadle_core.tickets import Json, Sampling, Ticket
from treadle_gateway import terms
from treadle_gateway.terms import Access, SessionSpec
from treadle_payloads.media import medium_to_wire
from treadle_payloads.outcomes import FAILURE_CLASSES, TERMINATIONS
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.ports import (
    Alias,
    Attempt,
    Discard,
    Failure,
    Install,
    Lease,
    Membership,
    Order,
    Result,
)
from treadle_runtime.fields import duration
from treadle_weights.layouts import Layout
from treadle_weights.wire import layout_to_wire, load_order_from_wire

_MESSAGE_BYTES = 4096


def lease_from_wire(message: experience_pb.LeaseTicketsResponse) -> Lease:
    return Lease(
        tickets=tuple(map(ticket_from_wire, message.tickets)),
        lease_s=message.lease.ToTimedelta().total_seconds(),
        complete=message.complete,
    )


def ticket_from_wire(message: experience_pb.Ticket) -> Ticket:
    """Raises InvalidFieldError naming the field."""
    deadline_s = message.deadline.ToTimedelta().total_seconds()
    for name, value in (
        ("attempt", message.attempt),
        ("max_tokens", message.max_tokens),
        ("deadline", deadline_s),
    ):
        if value <= 0:
            raise InvalidFieldError(f"ticket.{name}", limit="> 0", value=value)
    return Ticket(
        episode_id=checked_id("ticket.episode_id", message.episode_id),
        attempt=message.attempt,
        task_id=message.task_id,
        index=message.index,
        spec=_spec_from_wire(message.spec_json),
        sampling=Sampling(message.temperature, message.max_tokens),
        deadline_s=deadline_s,
        evaluation=message.evaluation,
    )


def attempt_to_wire(attempt: Attempt) -> experience_pb.Attempt:
    return experience_pb.Attempt(episode_id=attempt.episode_id, attempt=attempt.number)


def attempts_to_wire(attempts: Iterable[Attempt]) -> list[experience_pb.Attempt]:
    return [attempt_to_wire(attempt) for attempt in attempts]


def attempts_from_wire(messages: Iterable[experience_pb.Attempt]) -> Sequence[Attempt]:
    return [Attempt(message.episode_id, message.attempt) for message in messages]


def result_to_wire(result: Result) -> episode_pb2.EpisodeResult:
    message = episode_pb2.EpisodeResult(
        termination=TERMINATIONS[result.termination],
        metrics=result.metrics,
        turn_rewards=result.turn_rewards,
        num_tokens=result.num_tokens,
        num_trained=result.num_trained,
        versions=result.versions,
        traceparent=result.traceparent,
        payload=episode_pb2.Payload(
            sha256=result.payload.sha256,
            size=result.payload.size,
            inline=result.inline,
            node=result.payload.node,
            epoch=result.payload.epoch,
        ),
        media=map(medium_to_wire, result.media),
    )
    if result.reward is not None:
        message.reward = result.reward
    return message


def failure_to_wire(run_id: str, replica_id: str, attempt: Attempt, failure: Failure) -> Any:
    text = failure.message.encode()[:_MESSAGE_BYTES].decode(errors="ignore")
    return experience_pb.FailEpisodeRequest(
        run_id=run_id,
        replica_id=replica_id,
        attempt=attempt_to_wire(attempt),
        failure_class=FAILURE_CLASSES[failure.failure_class],
        message=text,
        traceparent=failure.traceparent,
    )


def membership_to_wire(
    run_id: str, engine_id: str, member: Membership, layout: Layout, wait_s: float
) -> refit_pb.AttendRequest:
    return refit_pb.AttendRequest(
        run_id=run_id,
        engine_id=engine_id,
        layout=layout_to_wire(layout),
        serving=member.serving,
        verified=member.verified,
        failed=member.failed,
        failure=member.failure,
        draining=member.draining,
        wait=duration(wait_s),
    )


def order_from_wire(message: refit_pb.AttendResponse) -> Order | None:
    """Raises InvalidFieldError on a load order that contradicts itself."""
    match message.WhichOneof("order"):
        case "load":
            return load_order_from_wire(message.load)
        case "install":
            return Install(message.install.version, message.install.trace_id)
        case "discard":
            return Discard(message.discard.version)
        case "alias":
            return Alias(message.alias.version, message.alias.base, message.alias.trace_id)
        case _:
            return None


def replica_to_wire(
    replica_id: str, state: ReplicaState, *, served_version: int, now: float
) -> rollout_pb.GetReplicaResponse:
    return rollout_pb.GetReplicaResponse(
        replica_id=replica_id,
        served_version=served_version,
        slots=state.slots,
        running=len(state.running),
        sampled_tokens=state.sampled_tokens,
        waited_s=state.waited_s(now),
        up_s=now - state.started_at,
        draining=state.draining,
    )


def session_to_wire(
    access: Access, spec: SessionSpec, *, model_name: str
) -> rollout_pb.OpenSessionResponse:
    return rollout_pb.OpenSessionResponse(
        session=access.session,
        token=access.token,
        openai_url=access.urls["openai"],
        anthropic_url=access.urls["anthropic"],
        model=model_name,
        task_json=json.dumps(dict(spec.task)).encode(),
        temperature=spec.sampling.temperature,
        max_tokens=spec.sampling.max_tokens,
        deadline=duration(spec.deadline_s),
    )


def outcome_from_wire(message: rollout_pb.EndSessionRequest) -> terms.Outcome:
    """Raises InvalidFieldError naming the field."""
    return terms.Outcome(
        reward=message.reward if message.HasField("reward") else None,
        turn_rewards=tuple(message.turn_rewards),
        metrics=dict(message.metrics),
        truncated=message.truncated,
        no_reward=message.no_reward,
    )


def _spec_from_wire(spec_json: bytes) -> dict[str, Json]:
    try:
        spec: object = json.loads(spec_json)
    except ValueError as error:
        raise InvalidFieldError("ticket.spec_json", limit="JSON", value=error) from error
    if not isinstance(spec, dict):
        limit = "a JSON object"
        raise InvalidFieldError("ticket.spec_json", limit=limit, value=type(spec).__name__)
    return cast("dict[str, Json]", spec)
