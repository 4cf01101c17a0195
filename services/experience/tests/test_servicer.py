"""Every method over a real channel: what it answers, and each error that the proto lists."""

import asyncio
import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as pb
from treadle.experience.v1 import experience_service_pb2_grpc as rpc
from treadle_core.episodes import Segment
from treadle_core.media import Medium, MediumSpan
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.core.run import Run
from treadle_experience.custody import Custody
from treadle_experience.keeper import Keeper
from treadle_experience.payloads import inline_limit
from treadle_experience.servicer import ExperienceServicer
from treadle_payloads.codec import encode_payload
from treadle_payloads.files import FileStore
from treadle_payloads.media import medium_to_wire
from treadle_payloads.store import PayloadReference
from treadle_runtime.channel import call
from treadle_runtime.errors import RemoteError
from treadle_runtime.testing import running

RUN = "run"


def segment(*, versions=(1, 1), tokens: int = 4) -> Segment:
    """Half prompt, half sampled; the sampled half cycles through `versions`."""
    sampled = np.arange(tokens) >= tokens // 2
    version = np.resize(np.array(versions, np.int32), tokens)
    version = np.where(sampled, version, np.int32(-1)).astype(np.int32)
    return Segment(
        token_ids=np.arange(tokens, dtype=np.int32),
        sampled=sampled,
        trained=sampled.copy(),
        logprobs=np.where(sampled, np.float32(-0.5), np.float32(0)).astype(np.float32),
        policy_version=version,
        context_version=version.copy(),
    )


def result_of(data: bytes, *, inline: bool = True, **changes) -> episode_pb2.EpisodeResult:
    payload = episode_pb2.Payload(
        sha256=PayloadReference.of(data).sha256, size=len(data), inline=data if inline else None
    )
    values = {
        "reward": 1.0,
        "termination": episode_pb2.TERMINATION_FINISHED,
        "metrics": {"calls": 1.0},
        "num_tokens": 4,
        "num_trained": 2,
        "versions": [1],
        "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
        "payload": payload,
    }
    return episode_pb2.EpisodeResult(**values | changes)


class Client:
    """Calls the service the way its peers do."""

    def __init__(self, channel, store) -> None:
        self.stub = rpc.ExperienceServiceStub(channel)
        self.store = store

    async def __call__(self, method: str, **fields):
        request = getattr(pb, f"{method}Request")(**{"run_id": RUN} | fields)
        return await call(getattr(self.stub, method), request, timeout_s=5)

    async def refused(self, method: str, **fields) -> RemoteError:
        with pytest.raises(RemoteError) as caught:
            await self(method, **fields)
        return caught.value

    async def start(self) -> None:
        await self("AcquireRun", holder="trainer")
        await self("CommitCheckpoint", trainer_epoch=1, digest="a" * 64, step=0, path="c/0")
        await self("AnnounceVersion", trainer_epoch=1, step=0, request_id="v1")
        await self("CommitVersion", trainer_epoch=1, version=1, weights_digest="0" * 16)

    async def lease(self, most: int = 1, **fields) -> list[pb.Ticket]:
        values = {"replica_id": "r1", "served_version": 1, "max_tickets": most, "slots": 8}
        return list((await self("LeaseTickets", **values | fields)).tickets)

    async def complete(self, ticket: pb.Ticket, result: episode_pb2.EpisodeResult):
        return await self("CompleteEpisode", **completion(ticket, result))

    async def train_one_step(self) -> pb.ClaimStepResponse:
        for ticket in await self.lease(99):
            data = encode_payload([segment()])
            await self.complete(ticket, result_of(data))
        claim = await self("ClaimStep", trainer_epoch=1, step=1)
        await self("ReportStep", trainer_epoch=1, step=1, metrics={"loss": 0.5})
        return claim


def completion(ticket: pb.Ticket, result: episode_pb2.EpisodeResult) -> dict:
    return {"replica_id": "r1", "attempt": attempt(ticket), "result": result}


def attempt(ticket: pb.Ticket, number: int | None = None) -> pb.Attempt:
    return pb.Attempt(episode_id=ticket.episode_id, attempt=number or ticket.attempt)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> FileStore:
    return FileStore(tmp_path_factory.mktemp("payloads"))


@pytest.fixture
def served(make_world, store):
    """Serves a run in this process; the keywords change its rules."""

    @contextlib.asynccontextmanager
    async def serve(**changes):
        world = make_world(**changes)
        run = Run(world.rules, world.run.sources)
        keeper = Keeper(run, MemoryLedger())
        writer = asyncio.ensure_future(keeper.write())
        limit = inline_limit(world.rules.tasks_per_step * world.rules.group_size)
        custody = Custody(keeper, store, asyncio.Queue(), limit=limit)
        servicer = ExperienceServicer(keeper, world.rules, custody)
        try:
            async with running(servicer.register, "treadle.experience") as channel:
                yield Client(channel, store)
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            keeper.close()
            custody.close()

    return serve


async def test_one_step_from_the_first_ticket_to_the_commit(served) -> None:
    async with served(max_lag=0) as client:
        await client.start()
        tickets = await client.lease(99)
        first = tickets[0]
        data = encode_payload([segment()])
        answers = [await client.complete(ticket, result_of(data)) for ticket in tickets]
        claim = await client("ClaimStep", trainer_epoch=1, step=1)
        await client("ReportStep", trainer_epoch=1, step=1, metrics={"loss": 0.5})
        retained = await client(
            "CommitCheckpoint",
            trainer_epoch=1,
            digest="b" * 64,
            parent_digest="a" * 64,
            step=1,
            path="c/1",
        )
        described = await client("GetRun")

    assert (first.task_id, first.index, first.attempt) == ("t000001", 0, 1)
    assert json.loads(first.spec_json) == {"number": 0}
    assert (first.temperature, first.max_tokens, first.deadline.seconds) == (1.0, 16, 60)
    assert not any(answer.duplicate for answer in answers)
    members = [episode for task in claim.tasks for episode in task.episodes]
    assert [e.episode_id for e in members] == [t.episode_id for t in tickets]
    assert all(e.result == result_of(data) and e.oldest_step == 0 for e in members)
    assert [c.digest[0] for c in retained.retained] == ["b", "a"]
    assert dict(described.tasks) == {"consumed": 2}
    assert dict(described.episodes) == {"done": 4}
    assert (described.trained_step, described.version, described.complete) == (1, 1, False)


async def test_a_batch_is_handed_back_and_claimed_again_mended(served) -> None:
    async with served() as client:
        await client.start()
        data = encode_payload([segment()])
        for ticket in await client.lease(99):
            await client.complete(ticket, result_of(data))
        claim = await client("ClaimStep", trainer_epoch=1, step=1)
        lost, unfit = claim.tasks[0].episodes[0], claim.tasks[1].episodes[1]
        reasons = ((lost, pb.FAULT_REASON_PAYLOAD_LOST), (unfit, pb.FAULT_REASON_QUARANTINED))
        faults = [
            pb.EpisodeFault(episode_id=e.episode_id, attempt=e.attempt, reason=reason, message="m")
            for e, reason in reasons
        ]

        for _ in range(2):
            await client("HandBackStep", trainer_epoch=1, step=1, faults=faults)
        early = await client("ClaimStep", trainer_epoch=1, step=1)
        (again,) = await client.lease(1)
        await client.complete(again, result_of(data))
        mended = await client("ClaimStep", trainer_epoch=1, step=1)
        described = await client("GetRun")

    assert not early.tasks
    assert (again.episode_id, again.attempt) == (lost.episode_id, 2)
    assert [task.task_id for task in mended.tasks] == ["t000001", "t000003"]
    assert mended.tasks[0].episodes[0].attempt == 2
    assert (dict(described.reasons), described.lost_payloads) == ({"unfit": 1}, 1)


async def test_a_payload_by_reference_must_lie_in_the_store(served) -> None:
    async with served() as client:
        await client.start()
        (ticket,) = await client.lease()
        data = encode_payload([segment(tokens=9000)])
        result = result_of(data, inline=False, num_tokens=9000, num_trained=4500)

        error = await client.refused("CompleteEpisode", **completion(ticket, result))
        client.store.put(data)
        answer = await client.complete(ticket, result)

    assert (error.reason, error.field) == ("PAYLOAD_MISSING", "result.payload.sha256")
    assert not answer.duplicate


async def test_inline_payloads_too_many_for_one_answer_are_moved_to_the_store(served) -> None:
    async with served(tasks_per_step=4096, group_size=4) as client:  # 2 KiB an episode
        await client.start()
        small, large = (await client.lease(2))[:2]
        data = encode_payload([segment(tokens=400)])
        result = result_of(data, num_tokens=400, num_trained=200)
        await client.complete(small, result_of(encode_payload([segment()])))

        first = await client.complete(large, result)
        again = await client.complete(large, result)

    assert (first.duplicate, again.duplicate) == (False, True)
    assert client.store.get(PayloadReference.of(data)) == data


async def test_a_report_says_when_payloads_ask_for_a_checkpoint(served) -> None:
    async with served(payload_budget_bytes=1) as client:
        await client.start()
        for ticket in await client.lease(99):
            await client.complete(ticket, result_of(encode_payload([segment()])))
        await client("ClaimStep", trainer_epoch=1, step=1)

        answer = await client("ReportStep", trainer_epoch=1, step=1)
        described = await client("GetRun")

    assert answer.checkpoint_now
    assert described.window_lag == 1


async def test_a_fault_outside_the_batch_is_refused(served) -> None:
    async with served() as client:
        await client.start()
        for ticket in await client.lease(99):
            await client.complete(ticket, result_of(encode_payload([segment()])))
        await client("ClaimStep", trainer_epoch=1, step=1)

        error = await client.refused(
            "HandBackStep", trainer_epoch=1, step=1, faults=[{**EPISODE, "reason": 1}]
        )

    assert (error.reason, error.field) == ("UNKNOWN_EPISODE", "faults")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        pytest.param({"num_trained": 1}, "result.num_trained", id="trained"),
        pytest.param({"versions": [2, 1]}, "result.versions", id="order"),
        pytest.param({"reward": float("nan")}, "result.reward", id="G8-nan"),
        pytest.param({"turn_rewards": [float("inf")]}, "result.turn_rewards[0]", id="turn"),
        pytest.param({"metrics": {str(i): 0.0 for i in range(5000)}}, "result.metrics", id="G27"),
        pytest.param({"termination": 0}, "result.termination", id="G14-unset"),
        pytest.param({"traceparent": "x"}, "result.traceparent", id="trace"),
    ],
)
async def test_a_result_that_cannot_be_is_refused_and_nothing_changes(
    served, changes, field
) -> None:
    async with served() as client:
        await client.start()
        (ticket,) = await client.lease()
        before = (await client("GetRun")).position
        result = result_of(encode_payload([segment()]), **changes)

        error = await client.refused("CompleteEpisode", **completion(ticket, result))

        assert (error.reason, error.field) == ("INVALID_FIELD", field)
        assert error.value != ""
        assert (await client("GetRun")).position == before
        assert not (await client.complete(ticket, result_of(encode_payload([segment()])))).duplicate


async def test_a_payload_too_large_to_be_inline_is_refused(served) -> None:
    async with served() as client:
        await client.start()
        (ticket,) = await client.lease()
        result = result_of(b"x" * 65537)

        error = await client.refused("CompleteEpisode", **completion(ticket, result))

    assert (error.field, error.limit) == ("result.payload.inline", "at most 65536 bytes")


REPLICA = {"replica_id": "r1"}
EPISODE = {"episode_id": "0" * 32, "attempt": 1}
LEASE = {**REPLICA, "served_version": 1, "max_tickets": 1, "slots": 8}
CHECKPOINT = {"trainer_epoch": 1, "digest": "b" * 64, "step": 0, "path": "c/1"}
BATCH = {"trainer_epoch": 1, "step": 1}
VERSION = {"trainer_epoch": 1, "version": 1, "weights_digest": "0" * 16}
FAILURE = {**REPLICA, "attempt": EPISODE, "failure_class": 2}


INVALID = [
    ("LeaseTickets", {**LEASE, "replica_id": "a/.."}, "replica_id"),
    ("LeaseTickets", {**LEASE, "max_tickets": 0}, "max_tickets"),
    ("LeaseTickets", {**LEASE, "wait": Duration(seconds=-1)}, "wait"),
    (
        "RenewLeases",
        {**REPLICA, "attempts": [{"episode_id": "a b", "attempt": 1}]},
        "attempts[0].episode_id",
    ),
    (
        "ReturnTickets",
        {**REPLICA, "attempts": [{"episode_id": "a", "attempt": 0}]},
        "attempts[0].attempt",
    ),
    ("FailEpisode", {**FAILURE, "failure_class": 0}, "failure_class"),
    ("AcquireRun", {"holder": "x", "checkpoint_digest": "A" * 64}, "checkpoint_digest"),
    (
        "ReportStep",
        {"trainer_epoch": 1, "step": 1, "metrics": {"loss": float("nan")}},
        "metrics.loss",
    ),
    ("HandBackStep", {**BATCH, "step": 0}, "step"),
    ("HandBackStep", {**BATCH, "faults": [EPISODE]}, "faults[0].reason"),
    (
        "HandBackStep",
        {**BATCH, "faults": [{**EPISODE, "reason": 1, "attempt": 0}]},
        "faults[0].attempt",
    ),
    ("CommitCheckpoint", {**CHECKPOINT, "path": "../x"}, "path"),
    ("CommitVersion", {**VERSION, "weights_digest": "0"}, "weights_digest"),
]
"""One bad field for each kind of check, and its name; `tests/badinput` has them all."""

REFUSED = [
    ("HandBackStep", {**BATCH, "trainer_epoch": 9}, "precondition TRAINER_FENCED", "trainer_epoch"),
    ("HandBackStep", BATCH, "precondition STEP_OUT_OF_ORDER", "step"),
    ("GetRun", {"run_id": "other"}, "precondition WRONG_RUN", "run_id"),
    (
        "LeaseTickets",
        {**LEASE, "served_version": 2},
        "precondition UNKNOWN_VERSION",
        "served_version",
    ),
    ("FailEpisode", FAILURE, "not_found UNKNOWN_EPISODE", "attempt"),
    ("AcquireRun", {"holder": "second"}, "precondition CHECKPOINT_REQUIRED", "checkpoint_digest"),
    (
        "AcquireRun",
        {"holder": "second", "checkpoint_digest": "f" * 64},
        "not_found UNKNOWN_CHECKPOINT",
        "checkpoint_digest",
    ),
    ("ClaimStep", {"trainer_epoch": 2, "step": 1}, "precondition TRAINER_FENCED", "trainer_epoch"),
    ("ClaimStep", {"trainer_epoch": 1, "step": 2}, "precondition STEP_OUT_OF_ORDER", "step"),
    ("ReportStep", {"trainer_epoch": 0, "step": 1}, "precondition TRAINER_FENCED", "trainer_epoch"),
    ("ReportStep", {"trainer_epoch": 1, "step": 1}, "precondition STEP_OUT_OF_ORDER", "step"),
    (
        "CommitCheckpoint",
        {**CHECKPOINT, "trainer_epoch": 9},
        "precondition TRAINER_FENCED",
        "trainer_epoch",
    ),
    ("CommitCheckpoint", CHECKPOINT, "precondition WRONG_PARENT", "parent_digest"),
    (
        "CommitCheckpoint",
        {**CHECKPOINT, "parent_digest": "a" * 64, "step": 1},
        "precondition STEP_OUT_OF_ORDER",
        "step",
    ),
    (
        "AnnounceVersion",
        {"trainer_epoch": 9, "step": 0, "request_id": "x"},
        "precondition TRAINER_FENCED",
        "trainer_epoch",
    ),
    (
        "AnnounceVersion",
        {"trainer_epoch": 1, "step": 1, "request_id": "x"},
        "precondition STEP_OUT_OF_ORDER",
        "step",
    ),
    (
        "CommitVersion",
        {**VERSION, "trainer_epoch": 9},
        "precondition TRAINER_FENCED",
        "trainer_epoch",
    ),
    ("CommitVersion", {**VERSION, "version": 5}, "not_found UNKNOWN_VERSION", "version"),
    ("AbortVersion", {"version": 5}, "not_found UNKNOWN_VERSION", "version"),
    ("AbortVersion", {"version": 1}, "precondition VERSION_ENDED", "version"),
]
"""Every other reason that the proto lists, after its kind."""


@pytest.mark.parametrize(
    ("method", "fields", "reason", "field"),
    [*((*row[:2], "invalid INVALID_FIELD", row[2]) for row in INVALID), *REFUSED],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_each_listed_error_names_its_field_and_changes_nothing(
    served, method, fields, reason, field
) -> None:
    async with served() as client:
        await client.start()
        before = (await client("GetRun")).position

        error = await client.refused(method, **fields)

        assert (f"{error.kind} {error.reason}", error.field) == (reason, field)
        assert error.limit
        assert (await client("GetRun")).position == before


async def test_a_stale_attempt_and_an_unregistered_version_are_refused(served) -> None:
    async with served() as client:
        await client.start()
        (ticket,) = await client.lease()
        unknown = result_of(encode_payload([segment(versions=(2, 2))]), versions=[2])

        unregistered = await client.refused("CompleteEpisode", **completion(ticket, unknown))
        failed = await client(
            "FailEpisode", replica_id="r1", attempt=attempt(ticket), failure_class=2
        )
        (again,) = await client.lease()
        stale = await client.refused(
            "CompleteEpisode", **completion(ticket, result_of(encode_payload([segment()])))
        )
        ahead = await client.refused(
            "FailEpisode", replica_id="r1", attempt=attempt(ticket, 3), failure_class=2
        )

    assert (unregistered.reason, unregistered.value) == ("UNKNOWN_VERSION", "2")
    assert failed.retried
    assert again.attempt == 2
    assert (stale.reason, stale.limit, stale.value) == ("STALE_ATTEMPT", "2", "1")
    assert ahead.reason == "UNKNOWN_EPISODE"


async def test_leases_are_renewed_returned_and_revoked(served) -> None:
    async with served() as client:
        await client.start()
        first, second = await client.lease(2)
        both = [attempt(first), attempt(second)]

        held = await client("RenewLeases", replica_id="r1", served_version=1, attempts=both)
        await client("ReturnTickets", replica_id="r1", attempts=both[:1])
        after = await client("RenewLeases", replica_id="r1", served_version=1, attempts=both)

    assert list(held.revoked) == []
    assert list(after.revoked) == both[:1]


async def test_long_polls_wake_on_news_and_end_on_time(served) -> None:
    async with served() as client:
        await client.start()
        tickets = await client.lease(99)
        position = (await client("GetRun")).position
        wait = Duration(seconds=4)
        news = asyncio.ensure_future(client("GetRun", after=position, wait=wait))
        more = asyncio.ensure_future(client.lease(wait=wait, replica_id="r2"))

        nothing = await client("ClaimStep", trainer_epoch=1, step=1, wait=Duration(nanos=1000))
        await client("ReturnTickets", replica_id="r1", attempts=[attempt(tickets[0])])

        assert not nothing.tasks
        assert (await news).position > position
        assert [t.episode_id for t in await more] == [tickets[0].episode_id]


async def test_the_end_is_told_to_replicas_and_to_the_trainer(served) -> None:
    async with served(steps=1) as client:
        await client.start()
        claim = await client.train_one_step()
        early = await client("LeaseTickets", **LEASE)
        await client("CommitCheckpoint", **CHECKPOINT | {"parent_digest": "a" * 64, "step": 1})
        late = await client("LeaseTickets", **LEASE)
        beyond = await client("ClaimStep", trainer_epoch=1, step=2)
        described = await client("GetRun")

    assert claim.last
    assert (early.complete, late.complete, beyond.complete) == (False, True, True)
    assert (described.complete, described.last_step) == (True, 1)


async def test_the_proto_and_the_servicer_have_the_same_methods() -> None:
    service = pb.DESCRIPTOR.services_by_name["ExperienceService"]

    missing = [m.name for m in service.methods if m.name not in vars(ExperienceServicer)]

    assert missing == []


async def test_an_unknown_field_of_a_newer_client_is_ignored(served) -> None:
    async with served() as client:
        raw = pb.GetRunRequest(run_id=RUN).SerializeToString() + b"\xc2\x3e\x03new"
        method = client.stub.GetRun
        answer = await method(pb.GetRunRequest.FromString(raw), timeout=5)

    assert answer.position == 1


async def test_a_preview_tells_whose_payload_lies_in_the_store_and_claims_nothing(served) -> None:
    async with served(max_lag=1) as client:
        await client.start()
        first, second, *rest = await client.lease(99)
        data = encode_payload([segment(tokens=8)])
        client.store.put(data)
        stored = result_of(data, inline=False, num_tokens=8, num_trained=4)
        await client.complete(first, stored)
        await client.complete(second, result_of(encode_payload([segment()])))

        answer = await client("PreviewSteps", max_steps=2)

        assert [(step.step, step.ready) for step in answer.steps] == [(1, False)]
        episodes = [episode for task in answer.steps[0].tasks for episode in task.episodes]
        held = {each.episode_id: each.result.payload.HasField("inline") for each in episodes}
        assert held == {first.episode_id: False, second.episode_id: True}
        assert not (await client("ClaimStep", trainer_epoch=1, step=1)).tasks
        assert rest
        refused = await client.refused("PreviewSteps", max_steps=-1)
        assert (refused.reason, refused.field) == ("INVALID_FIELD", "max_steps")


CAT = Medium.of(b"cat", "image/png")


def showing(*media: Medium, **changes) -> episode_pb2.EpisodeResult:
    """A result whose payload shows CAT, and that names `media`."""
    shown = replace(segment(), media=(MediumSpan(CAT.sha256, 0, 2),))
    return result_of(encode_payload([shown]), media=map(medium_to_wire, media), **changes)


async def test_media_come_back_with_the_claim_and_lie_in_the_store(served) -> None:
    async with served(tasks_per_step=1) as client:
        await client.start()
        client.store.put(b"cat")
        for ticket in await client.lease(2):
            await client.complete(ticket, showing(CAT))
            assert (await client.complete(ticket, showing(CAT))).duplicate
        claim = await client("ClaimStep", trainer_epoch=1, step=1)

    assert [e.result for e in claim.tasks[0].episodes] == [showing(CAT)] * 2


async def test_a_medium_that_the_store_does_not_hold_is_asked_for_by_its_field(served) -> None:
    gone = Medium.of(b"never stored", "image/png")
    shown = replace(segment(), media=(MediumSpan(gone.sha256, 0, 1),))
    result = result_of(encode_payload([shown]), media=[medium_to_wire(gone)])
    async with served() as client:
        await client.start()
        (ticket,) = await client.lease()

        error = await client.refused("CompleteEpisode", **completion(ticket, result))

    assert (error.kind, error.reason) == ("not_found", "PAYLOAD_MISSING")
    assert (error.field, error.value) == ("result.media[0].sha256", gone.sha256)
