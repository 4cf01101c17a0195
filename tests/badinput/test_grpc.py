"""What broken peers send to the experience service: each is refused by name, and changes nothing.

The service is the real process with its real ledger; the ids are those of the bad-input catalogue.
"""

import math
import uuid
from typing import Any

import grpc
import pytest
from badinput_harness import (
    LEASE,
    PATIENCE_S,
    Service,
    World,
    attempt,
    begin,
    completion,
    experience_settings,
    lease,
    refusal,
    result,
    serving,
    sums,
    until,
)

from treadle_runtime.channel import MESSAGE_LIMIT
from treadle_runtime.fields import duration
from treadle_runtime.server import CALLS_AT_ONCE

pytestmark = pytest.mark.processes

INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")
BAD_IDS = {
    "slash": "a/b",
    "dots": "..",
    "nul": "a\0b",
    "newline": "a\n",
    "star": "a*",
    "greater": "a>b",
    "space": "a b",
    "unicode": "é",
    "long": "a" * 129,
}

EPISODE = {"episode_id": "0" * 32, "attempt": 1}
CHECKPOINT = {"trainer_epoch": 1, "digest": "b" * 64, "parent_digest": "a" * 64, "step": 0}
ANNOUNCE = {"trainer_epoch": 1, "step": 0, "request_id": "x"}
COMMIT = {"trainer_epoch": 1, "version": 1, "weights_digest": "0" * 16}
REPORT = {"trainer_epoch": 1, "step": 1}
CLAIM = {"trainer_epoch": 1, "step": 1}
FAIL = {"replica_id": "r1", "attempt": EPISODE, "failure_class": 2}
EVERY = {
    "LeaseTickets": LEASE,
    "RenewLeases": {"replica_id": "r1"},
    "CompleteEpisode": {"replica_id": "r1", "attempt": EPISODE, "result": result()},
    "FailEpisode": FAIL,
    "ReturnTickets": {"replica_id": "r1"},
    "AcquireRun": {"holder": "trainer"},
    "ClaimStep": CLAIM,
    "HandBackStep": {"trainer_epoch": 1, "step": 1},
    "ReportStep": REPORT,
    "CommitCheckpoint": {**CHECKPOINT, "path": "c/1"},
    "AnnounceVersion": ANNOUNCE,
    "CommitVersion": COMMIT,
    "AbortVersion": {"version": 1},
    "GetRun": {},
    "PreviewSteps": {"max_steps": 1},
    "CheckPayloads": {"sha256s": ["0" * 64]},
}
IDS = [
    ("LeaseTickets", "replica_id", "replica_id"),
    ("RenewLeases", "replica_id", "replica_id"),
    ("CompleteEpisode", "replica_id", "replica_id"),
    ("AcquireRun", "holder", "holder"),
    ("AnnounceVersion", "request_id", "request_id"),
]


def refused(world: World, method: str, fields: dict[str, Any], field: str) -> Any:
    """Refuses a call, for `field`, by a process whose ledger stays what it was."""
    ticket = world.ticket()
    before = world.ledger()

    found = world.peer.refused(method, **fields)

    assert found.field == field
    assert field in found.message
    assert "Traceback" not in found.message
    assert ".py" not in found.message
    world.holds_after(before, ticket)
    return found


@pytest.mark.parametrize("method", EVERY)
def test_g3_a_call_without_a_run_is_refused(world: World, method: str) -> None:
    found = refused(world, method, {**EVERY[method], "run_id": ""}, "run_id")

    assert (found.code, found.reason) == INVALID


@pytest.mark.parametrize("method", EVERY)
def test_a_call_for_another_run_is_refused(world: World, method: str) -> None:
    found = refused(world, method, {**EVERY[method], "run_id": "other"}, "run_id")

    assert (found.code, found.reason) == ("FAILED_PRECONDITION", "WRONG_RUN")


def test_every_method_of_the_contract_is_in_the_catalogue(world: World) -> None:
    assert sorted(EVERY) == sorted(world.peer.methods)


@pytest.mark.parametrize("bad", BAD_IDS.values(), ids=[f"G4-{name}" for name in BAD_IDS])
@pytest.mark.parametrize(("method", "name", "field"), IDS, ids=[f"{m}.{n}" for m, n, _ in IDS])
def test_an_id_that_could_be_a_path_or_a_subject_is_refused(
    world: World, method: str, name: str, field: str, bad: str
) -> None:
    found = refused(world, method, {**EVERY[method], name: bad}, field)

    assert (found.code, found.reason) == INVALID


ROWS = [
    ("G3-replica", "LeaseTickets", LEASE | {"replica_id": ""}, "replica_id"),
    ("G3-holder", "AcquireRun", {"holder": ""}, "holder"),
    ("G3-request", "AnnounceVersion", ANNOUNCE | {"request_id": ""}, "request_id"),
    ("G3-attempt", "FailEpisode", FAIL | {"attempt": None}, "attempt.episode_id"),
    ("G3-digest", "CommitCheckpoint", {**CHECKPOINT, "digest": "", "path": "c"}, "digest"),
    ("G4-path-up", "CommitCheckpoint", {**CHECKPOINT, "path": "../c"}, "path"),
    ("G4-path-root", "CommitCheckpoint", {**CHECKPOINT, "path": "/c"}, "path"),
    ("G4-path-nul", "CommitCheckpoint", {**CHECKPOINT, "path": "c\0"}, "path"),
    ("G5-tickets", "LeaseTickets", LEASE | {"max_tickets": 0}, "max_tickets"),
    ("G5-slots", "LeaseTickets", LEASE | {"slots": -1}, "slots"),
    ("G5-wait", "LeaseTickets", LEASE | {"wait": duration(-1)}, "wait"),
    ("G5-attempt", "FailEpisode", FAIL | {"attempt": {**EPISODE, "attempt": 0}}, "attempt.attempt"),
    ("G5-served", "RenewLeases", {"replica_id": "r1", "served_version": -1}, "served_version"),
    ("G5-claim", "ClaimStep", CLAIM | {"step": 0}, "step"),
    ("G5-report", "ReportStep", REPORT | {"step": -1}, "step"),
    ("G5-after", "GetRun", {"after": -1}, "after"),
    ("G4-payload", "CheckPayloads", {"sha256s": ["0" * 64, "../x"]}, "sha256s[1]"),
    ("G5-payloads", "CheckPayloads", {"sha256s": ["0" * 64] * 65537}, "sha256s"),
    ("G5-preview", "PreviewSteps", {"max_steps": -1}, "max_steps"),
    ("G5-version", "AbortVersion", {"version": 0}, "version"),
    ("G8-report", "ReportStep", REPORT | {"metrics": {"loss": math.nan}}, "metrics.loss"),
    ("G14-class", "FailEpisode", FAIL | {"failure_class": 0}, "failure_class"),
    ("G14-unknown", "FailEpisode", FAIL | {"failure_class": 77}, "failure_class"),
    (
        "G5-attempts",
        "RenewLeases",
        {"replica_id": "r1", "attempts": [EPISODE] * 65537},
        "attempts",
    ),
]


@pytest.mark.parametrize(
    ("method", "fields", "field"), [pytest.param(*row[1:], id=row[0]) for row in ROWS]
)
def test_a_field_outside_its_limits_is_refused_by_name(
    world: World, method: str, fields: dict[str, Any], field: str
) -> None:
    found = refused(world, method, fields, field)

    assert (found.code, found.reason) == INVALID


STATES = [
    ("G18-lease", "LeaseTickets", LEASE | {"served_version": 12}, "UNKNOWN_VERSION"),
    ("G18-renew", "RenewLeases", {"replica_id": "r1", "served_version": 12}, "UNKNOWN_VERSION"),
    ("G21-claim", "ClaimStep", CLAIM | {"trainer_epoch": 0}, "TRAINER_FENCED"),
    ("G21-ahead", "ClaimStep", CLAIM | {"trainer_epoch": 2**62}, "TRAINER_FENCED"),
    ("G21-report", "ReportStep", REPORT | {"trainer_epoch": 0}, "TRAINER_FENCED"),
    (
        "G21-checkpoint",
        "CommitCheckpoint",
        {**CHECKPOINT, "path": "c", "trainer_epoch": 0},
        "TRAINER_FENCED",
    ),
    ("G21-announce", "AnnounceVersion", ANNOUNCE | {"trainer_epoch": 0}, "TRAINER_FENCED"),
    ("step", "ReportStep", REPORT, "STEP_OUT_OF_ORDER"),
]


@pytest.mark.parametrize(
    ("method", "fields", "reason"), [pytest.param(*row[1:], id=row[0]) for row in STATES]
)
def test_what_the_state_does_not_allow_is_refused_with_its_reason(
    world: World, method: str, fields: dict[str, Any], reason: str
) -> None:
    ticket = world.ticket()
    before = world.ledger()

    found = world.peer.refused(method, **fields)

    assert (found.code, found.reason) == ("FAILED_PRECONDITION", reason)
    assert found.field in found.message or "fenced by epoch 1" in found.message
    world.holds_after(before, ticket)


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip], ids=["G1", "G26"])
def test_a_message_beyond_the_limit_is_refused_whole(world: World, compression: Any) -> None:
    ticket = world.ticket()
    before = world.ledger()
    fields = FAIL | {"attempt": attempt(ticket), "message": "x" * (MESSAGE_LIMIT + 1)}
    request = world.peer.request("FailEpisode", **fields)

    found = world.peer.tried("FailEpisode", request, timeout=30, compression=compression)

    assert found is not None
    assert found.code == "RESOURCE_EXHAUSTED"
    assert str(MESSAGE_LIMIT) in found.message
    world.holds_after(before, ticket)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a\x04\xed\xa0\x80x", id="G29-surrogate"),
        pytest.param(b"\x0a\x02\xff\xfe", id="G29-utf8"),
        pytest.param(b"\x80\x04\x95pickle", id="G13-no-message"),
        pytest.param(b"\x0b" * 200 + b"\x0c" * 200, id="G27-depth"),
        pytest.param(b"\x0a\x7f", id="cut-short"),
    ],
)
def test_bytes_that_are_no_message_are_refused(world: World, data: bytes) -> None:
    ticket = world.ticket()
    before = world.ledger()

    found = world.peer.tried("LeaseTickets", data)

    assert found is not None
    assert (found.code, found.reason, found.field) == (*INVALID, "request")
    world.holds_after(before, ticket)


def test_g28_fields_of_a_newer_contract_are_ignored(world: World) -> None:
    request = world.peer.request("GetRun").SerializeToString() + b"\xc2\x3e\x03new"

    assert world.peer.send("GetRun", request) == world.peer("GetRun")


def test_g30_more_calls_at_once_than_are_served_are_refused(world: World) -> None:
    ticket = world.ticket()
    before = world.ledger()
    request = world.peer.request("GetRun", after=before[0].position, wait=duration(60))
    path = "/treadle.experience.v1.ExperienceService/GetRun"
    call, data = world.peer._channel.unary_unary(path), request.SerializeToString()

    calls, beyond = [], None
    while beyond is None and len(calls) < 2 * CALLS_AT_ONCE:
        calls += [call.future(data, timeout=PATIENCE_S) for _ in range(256)]
        beyond = world.peer.tried("GetRun", world.peer.request("GetRun"))
    for each in calls:
        each.cancel()

    assert beyond is not None
    assert beyond.code == "RESOURCE_EXHAUSTED"
    assert len(calls) >= CALLS_AT_ONCE
    until(lambda: world.peer.tried("GetRun", world.peer.request("GetRun")) is None)
    world.holds_after(before, ticket)


def test_g28_another_contract_is_refused_with_both_versions(world: World) -> None:
    ticket = world.ticket()
    before = world.ledger()
    call = world.peer._channel.unary_unary("/treadle.experience.v2.ExperienceService/GetRun")

    with pytest.raises(grpc.RpcError) as raised:
        call(b"", timeout=PATIENCE_S)

    found = refusal(raised.value)
    assert (found.code, found.reason) == ("FAILED_PRECONDITION", "OTHER_CONTRACT")
    assert found.field == "contract"
    assert "v2" in found.message
    assert "v1" in found.message
    world.holds_after(before, ticket)


def test_a_method_that_does_not_exist_is_unimplemented(world: World) -> None:
    call = world.peer._channel.unary_unary("/treadle.experience.v1.ExperienceService/DropAll")
    with pytest.raises(grpc.RpcError) as raised:
        call(b"", timeout=20)

    assert refusal(raised.value).code == "UNIMPLEMENTED"
    assert world.service.is_up


def test_g23_a_call_without_a_deadline_is_answered(world: World) -> None:
    """The bound itself is tested beside the interceptor, with a shorter one."""
    assert world.peer.send("GetRun", world.peer.request("GetRun"), timeout=None).position > 0
    assert world.peer.send("GetRun", world.peer.request("GetRun"), timeout=1e7).position > 0


def test_g24_a_call_that_is_cancelled_while_it_waits_leaves_nothing(world: World) -> None:
    ticket = world.ticket()
    before = world.ledger()
    position = before[0].position
    request = world.peer.request("GetRun", after=position, wait=duration(20))
    path = "/treadle.experience.v1.ExperienceService/GetRun"

    call = world.peer._channel.unary_unary(path).future(request.SerializeToString(), timeout=20)
    call.cancel()

    assert call.cancelled()
    world.holds_after(before, ticket)


def test_g24_a_mutation_whose_caller_left_is_safe_to_repeat(world: World) -> None:
    ticket = world.ticket()
    request = world.peer.request("CompleteEpisode", **completion(ticket)).SerializeToString()
    path = "/treadle.experience.v1.ExperienceService/CompleteEpisode"

    call = world.peer._channel.unary_unary(path).future(request, timeout=20)
    call.cancel()
    world.peer.send("CompleteEpisode", request)

    assert world.peer.send("CompleteEpisode", request).duplicate
    sums(world.service.directory)


def test_g19_no_ticket_is_issued_beyond_the_lag_bound(tmp_path: Any) -> None:
    settings = experience_settings(tmp_path, tmp_path, group_size=2)
    with serving(Service("experience", tmp_path, settings)) as peer:
        begin(peer)
        leased = lease(peer, max_tickets=1000)
        more = lease(peer, max_tickets=1000, replica_id=uuid.uuid4().hex)

    window = (settings["max_lag"] + 1) * settings["tasks_per_step"]
    assert len({ticket.task_id for ticket in leased}) == window
    assert more == []
