"""Media of episodes: kept while a result needs them, counted once, and gone with the last."""

import asyncio
import contextlib
import hashlib
import io
import json

import numpy as np
import pytest

from treadle.episode.v1 import episode_pb2
from treadle_core.episodes import Segment, Termination
from treadle_core.errors import PayloadMissingError
from treadle_core.faults import FaultReason
from treadle_core.media import Medium, MediumSpan
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.core import groups, results
from treadle_experience.core.condensation import condense, size
from treadle_experience.core.run import Run
from treadle_experience.core.state import Attempt, Result, TaskState
from treadle_experience.core.transitions import PayloadsReleased, from_body, kind_of, to_body
from treadle_experience.custody import Custody
from treadle_experience.effects import Effects
from treadle_experience.keeper import Keeper
from treadle_payloads.codec import encode_payload
from treadle_payloads.spool import Spool
from treadle_payloads.store import Hold, PayloadReference
from treadle_runtime.doorbells.poll import PollDoorbell
from treadle_runtime.tracker import JsonlTracker

CAT_BYTES = b"cat" * 100
CAT = Medium.of(CAT_BYTES, "image/png")
DOG = Medium.of(b"dog" * 50, "image/jpeg")


def through_json(transition):
    """As a ledger stores it and reads it."""
    body = json.loads(json.dumps(to_body(transition)))
    return from_body(kind_of(transition), body, getattr(transition, "inline", None))


def train_with_media(world) -> None:
    """One step of which every member shows CAT, and the last one DOG too."""
    tickets = world.lease(1)
    for ticket in tickets:
        world.complete(ticket, media=(CAT, DOG) if ticket is tickets[-1] else (CAT,))
    world.claim(1)
    world.report(1)


def test_a_medium_counts_once_however_many_show_it(make_world) -> None:
    world = make_world(max_lag=0).start()

    tickets = world.lease(1)
    for ticket in tickets:
        world.complete(ticket, media=(CAT,), inlined=False)

    sizes = sum(episode.result.size for episode in world.state.episodes.values())
    assert world.state.payload_bytes == sizes + CAT.size
    assert world.state.references[CAT.sha256] == len(tickets) == 4


def test_what_is_consumed_lets_its_media_go_with_their_holders(make_world) -> None:
    world = make_world(max_lag=0).start()
    for ticket in world.lease(1):
        world.complete(ticket, media=(CAT, DOG))
    for step in (1, 2):
        world.train(step)
        world.publish(step)
        world.checkpoint(step)

    released = [each for each in world.save() if isinstance(each, PayloadsReleased)]

    held = [pair for each in released for pair in zip(each.stored, each.held, strict=True)]
    first = [episode.episode_id for episode in list(world.state.episodes.values())[:4]]
    assert sorted(held) == sorted((m.sha256, ("", id_)) for m in (CAT, DOG) for id_ in first)
    assert (world.state.references, world.state.shown) == ({}, {})
    consumed = sum(e.result.size for e in list(world.state.episodes.values())[4:] if e.result)
    assert world.state.payload_bytes == consumed


def test_what_is_filtered_lost_or_quarantined_lets_its_media_go(make_world) -> None:
    world = make_world(max_lag=0, retries=0).start()
    waste, sibling, *others = world.lease(1)
    world.complete(sibling, media=(CAT,))
    world.fail(waste)
    assert world.state.references == {}
    for ticket in (*others, *world.lease(1)):
        world.complete(ticket, media=(DOG,))
    (lost, kept), (unfit, culprit) = (task.episodes for task in world.claim(1).tasks)

    world.hand_back(1, (lost[0], FaultReason.PAYLOAD_LOST), (culprit[0], FaultReason.QUARANTINED))

    # The culprit's are kept, for whoever looks into it.
    assert world.state.references == {DOG.sha256: 2}
    assert [each[0].released for each in (kept, unfit, culprit)] == [False, True, False]
    (again,) = world.lease(1, 1)
    assert (again.episode_id, again.attempt) == (lost[0].episode_id, 2)


def test_a_journal_with_media_reads_and_condenses_to_an_equal_state(make_world) -> None:
    world = make_world(max_lag=3).start()
    train_with_media(world)
    journal = world.save()

    assert [through_json(each) for each in journal] == journal
    assert world.reload() == world.state
    state = world.state
    assert size(state) <= state.position
    restored = make_world(max_lag=3).fresh_run()
    restored.load([through_json(each) for each in condense(state)])
    assert restored.state == state
    assert state.shown[CAT.sha256] > state.shown[DOG.sha256] == 1


def test_a_journal_from_before_there_were_media_is_read(make_world) -> None:
    world = make_world().start()
    world.complete(world.lease(1)[0])
    body = json.loads(json.dumps(to_body(world.save()[-1])))
    del body["result"]["media"]

    assert from_body("episode_done", body, world.journal[-1].inline) == world.journal[-1]


class Node:
    """A run whose ledger is in memory, and the spool of its only node."""

    def __init__(self, world, directory) -> None:
        self.world = world
        world.run = Run(world.rules, world.run.sources)
        tracker = JsonlTracker(directory / "metrics.jsonl")
        effects = Effects(world.state, tracker, PollDoorbell(run_id="run"))
        self.keeper = Keeper(world.run, MemoryLedger(), on_durable=effects.follow)
        self.spool = Spool(directory / "payloads", budget_bytes=10_000)
        self.custody = Custody(self.keeper, self.spool, effects.released, limit=1_000)

    async def do(self, decide, *arguments):
        return await self.keeper.ask(lambda run: decide(*arguments))

    def put(self, data: bytes, holder: str) -> PayloadReference:
        reference = PayloadReference.of(data)
        self.spool.put(reference, holder, lambda: io.BytesIO(data).readinto)
        return reference

    async def complete(self, ticket, medium: Medium) -> None:
        """As the servicer does."""
        data = encode_payload([segment(medium)])
        result = make_result(data, medium)
        payload = episode_pb2.Payload(inline=data)
        async with self.custody.taken(payload, result, ticket.episode_id) as (taken, inline):
            await self.keeper.ask(
                results.complete,
                replica_id="r1",
                attempt=Attempt(ticket.episode_id, ticket.attempt),
                result=taken,
                inline=inline,
            )

    def stored(self) -> set[str]:
        return {sha256 for sha256, _ in self.spool.files.objects()}


def segment(medium: Medium) -> Segment:
    """Two tokens that show the medium, and one that the policy said."""
    sampled = np.array([False, False, True])
    versions = np.where(sampled, 1, -1).astype(np.int32)
    return Segment(
        token_ids=np.arange(3, dtype=np.int32),
        sampled=sampled,
        trained=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        policy_version=versions,
        context_version=versions,
        media=(MediumSpan(medium.sha256, 0, 2),),
    )


def make_result(data: bytes, medium: Medium) -> Result:
    return Result(
        reward=1.0,
        termination=Termination.FINISHED,
        metrics={},
        turn_rewards=(),
        num_tokens=3,
        num_trained=1,
        versions=(1,),
        traceparent="",
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        inlined=True,
        media=(medium,),
    )


@pytest.fixture
def node(make_world, tmp_path):
    @contextlib.asynccontextmanager
    async def make(**changes):
        made = Node(make_world(**changes), tmp_path)
        writer = asyncio.ensure_future(made.keeper.write())
        await made.do(made.world.start)
        try:
            yield made
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            made.keeper.close()
            made.custody.close()

    return make


async def test_a_group_with_one_image_leaves_one_object_until_the_last_of_it_is_released(
    node,
) -> None:
    async with node(group_size=16, tasks_per_step=1, max_lag=0) as made:
        world = made.world
        for ticket in await made.do(world.lease, 1):
            made.put(CAT_BYTES, ticket.episode_id)
            await made.complete(ticket, CAT)
        assert (made.stored(), made.spool.used_bytes) == ({CAT.sha256}, CAT.size)
        for step, left in ((1, {CAT.sha256}), (2, set())):
            await made.do(world.train, step)
            await made.do(world.publish, step)
            await made.do(world.checkpoint, step)
            await made.custody.finish()
            assert made.stored() == left


async def test_a_medium_outlives_the_release_of_one_of_those_that_show_it(node) -> None:
    async with node(retries=0) as made:
        world = made.world
        waste, sibling, other = (await made.do(world.lease, 1))[:3]
        for ticket in (sibling, other):
            made.put(CAT_BYTES, ticket.episode_id)
            await made.complete(ticket, CAT)

        await made.do(world.fail, waste)
        await made.custody.finish()
        assert made.stored() == {CAT.sha256}
        task = world.state.tasks[other.task_id]
        await made.do(groups.discard, world.run, task, TaskState.FILTERED, "no_reward")
        await made.custody.finish()

        assert made.stored() == set()


async def test_the_next_attempt_at_an_episode_keeps_the_image_that_the_one_before_let_go(
    node,
) -> None:
    async with node(max_lag=0) as made:
        world = made.world
        for ticket in await made.do(world.lease, 1):
            made.put(CAT_BYTES, ticket.episode_id)
            await made.complete(ticket, CAT)
        claim = await made.do(world.claim, 1)
        lost = [episode for task in claim.tasks for episode, _ in task.episodes]
        await made.do(world.hand_back, 1, *((each, FaultReason.PAYLOAD_LOST) for each in lost))
        for ticket in await made.do(world.lease, 1):
            made.put(CAT_BYTES, ticket.episode_id)
            await made.complete(ticket, CAT)

        await made.custody.finish()  # only now: the release comes after the arrival

        assert made.stored() == {CAT.sha256}
        assert world.state.references[CAT.sha256] == len(lost) == 4
        holds = [Hold(PayloadReference(CAT.sha256, 0), each.episode_id) for each in lost]
        made.spool.release(holds[1:], writer_epoch=made.keeper.writer_epoch)
        assert made.stored() == {CAT.sha256}  # the first of them has its hold still


@pytest.mark.parametrize(
    "held", [None, b"cat", CAT_BYTES + b"!"], ids=["nothing", "less", "another"]
)
async def test_a_medium_that_is_not_there_is_named_and_nothing_is_recorded(node, held) -> None:
    async with node() as made:
        (ticket,) = await made.do(made.world.lease, 1, 1)
        if held is not None:
            made.put(held, ticket.episode_id)
        position = made.keeper.position

        with pytest.raises(PayloadMissingError) as raised:
            await made.complete(ticket, CAT)

        assert (raised.value.field, raised.value.value) == ("result.media[0].sha256", CAT.sha256)
        assert made.keeper.position == position
        made.put(CAT_BYTES, ticket.episode_id)
        await made.complete(ticket, CAT)
