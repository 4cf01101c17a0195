import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.refit.v1 import refit_service_pb2 as refit_pb
from treadle_core.episodes import Segment
from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_rollout import wire
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.core.results import Verdict, verdict, versions_of
from treadle_rollout.ports import Alias, Attempt, Install
from treadle_runtime.errors import RemoteError
from treadle_runtime.fields import duration


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 4), st.booleans()), max_size=40))
def test_slots_are_never_lost_and_never_given_twice(events: list) -> None:
    state = ReplicaState(slots=4, started_at=0.0)
    held: set[Attempt] = set()
    for episode, number, starts in events:
        attempt = Attempt(episode, number)
        if starts and state.free:
            older = state.start(attempt)
            assert set(older) == {h for h in held if h.episode_id == episode and h.number < number}
            held.add(attempt)
        else:
            state.end(attempt, "completed")
            held.discard(attempt)
        assert set(state.running) == held
        assert state.free == 4 - len(held)


def test_only_the_time_in_which_a_ticket_was_asked_for_counts_as_waited() -> None:
    state = ReplicaState(slots=1, started_at=10.0)
    state.begin_wait(11.0)
    assert state.waited_s(13.0) == 2.0
    state.end_wait(14.0)
    state.begin_wait(20.0)
    state.end_wait(20.5)
    assert state.waited_s(99.0) == 3.5
    row = state.row(served_version=7, now=99.0)
    assert (row["waited_s"], row["up_s"], row["served_version"]) == (3.5, 89.0, 7)


@pytest.mark.parametrize(
    ("kind", "reason", "expected"),
    [
        (Kind.UNAVAILABLE, "PEER_AWAY", Verdict.RETRY),
        (Kind.UNAVAILABLE, "SHUTTING_DOWN", Verdict.RETRY),
        (Kind.EXHAUSTED, "PAYLOAD_STORE_FULL", Verdict.RETRY),
        (Kind.CORRUPT, "PAYLOAD_CORRUPT", Verdict.RETRY),
        (Kind.BROKEN, "LEDGER_FAILED", Verdict.RETRY),
        (Kind.PRECONDITION, "WRITER_FENCED", Verdict.RETRY),
        (Kind.PRECONDITION, "PAYLOAD_KEEPER_FENCED", Verdict.RETRY),
        (Kind.UNAVAILABLE, "PAYLOAD_STORE_AWAY", Verdict.RETRY),
        (Kind.NOT_FOUND, "PAYLOAD_MISSING", Verdict.RETRY),
        (Kind.PRECONDITION, "STALE_ATTEMPT", Verdict.DROP),
        (Kind.NOT_FOUND, "UNKNOWN_EPISODE", Verdict.DROP),
        (Kind.CONFLICT, "RESULT_CONFLICT", Verdict.DROP),
        (Kind.PRECONDITION, "UNKNOWN_VERSION", Verdict.REFUSED),
        (Kind.INVALID, "INVALID_FIELD", Verdict.REFUSED),
        (Kind.PRECONDITION, "WRONG_RUN", Verdict.END),
    ],
)
def test_what_a_refusal_means(kind: Kind, reason: str, expected: Verdict) -> None:
    error: TreadleError = RemoteError(kind, reason, "")
    assert verdict(error) is expected


def test_versions_are_those_of_sampled_tokens_contexts_included() -> None:
    sampled = np.array([False, True, True, False, True])
    segment = Segment(
        token_ids=np.arange(5, dtype=np.int32),
        sampled=sampled,
        trained=sampled,
        logprobs=np.where(sampled, np.float32(-1), np.float32(0)),
        policy_version=np.array([-1, 3, 4, -1, 9], np.int32),
        context_version=np.array([-1, 2, 2, -1, 4], np.int32),
    )
    assert versions_of([segment, segment]) == (2, 3, 4, 9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("episode_id", ""),
        ("episode_id", "../x"),
        ("attempt", 0),
        ("attempt", -1),
        ("max_tokens", 0),
        ("deadline", duration(0)),
        ("spec_json", b""),
        ("spec_json", b"[1]"),
        ("spec_json", b"\xff{}"),
    ],
)
def test_a_ticket_that_cannot_be_run_is_refused_by_the_name_of_its_field(
    field: str, value: object
) -> None:
    good = {
        "episode_id": "e",
        "attempt": 1,
        "spec_json": b"{}",
        "max_tokens": 1,
        "deadline": duration(1.5),
    }
    assert wire.ticket_from_wire(pb.Ticket(**good)).deadline_s == 1.5
    with pytest.raises(InvalidFieldError) as refused:
        wire.ticket_from_wire(pb.Ticket(**(good | {field: value})))
    assert refused.value.field == f"ticket.{field}"


def test_orders_come_from_the_wire_as_they_were_given() -> None:
    trace = "ab" * 16
    given = refit_pb.AliasOrder(version=3, base=2, trace_id=trace)
    assert wire.order_from_wire(refit_pb.AttendResponse(alias=given)) == Alias(3, 2, trace)
    installed = refit_pb.InstallOrder(version=3, trace_id=trace)
    assert wire.order_from_wire(refit_pb.AttendResponse(install=installed)) == Install(3, trace)
    assert wire.order_from_wire(refit_pb.AttendResponse()) is None
