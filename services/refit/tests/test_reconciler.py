import asyncio
from typing import Any

import pytest

from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_core.versions import VersionState
from treadle_refit.core.errors import TrainerFencedError, VersionEndedError
from treadle_refit.core.orders import Discard, Install
from treadle_weights.layouts import Layout, whole
from treadle_weights.plan import LayoutMismatchError
from treadle_weights.transport import LoadOrder

LAYOUT = whole({"a": ("float32", (4,)), "b": ("float32", (2,))})
World = Any


def state(world: World, version: int) -> VersionState:
    return world.ledger.versions[version].state


async def serve(world: World, engine_id: str, version: int) -> None:
    """An engine joins and comes to serve the newest committed version."""
    order = await world.attend(engine_id)
    assert isinstance(order, LoadOrder)
    assert order.version == version
    assert isinstance(await world.attend(engine_id, verified=version), Install)
    assert await world.attend(engine_id, serving=version) is None


async def test_a_version_commits_without_members_at_once(world: World) -> None:
    sent = await world.publish()

    assert (sent.version, sent.members, sent.left_behind) == (1, 0, 0)
    assert state(world, 1) is VersionState.COMMITTED
    assert len(world.ledger.versions[1].weights_digest) == 16


async def test_a_version_goes_to_its_members_before_it_commits_and_is_installed_after(
    world: World,
) -> None:
    await world.publish(step=0)
    await serve(world, "e1", 1)
    idle = asyncio.create_task(world.attend("e1", serving=1, wait_s=30))
    opened = await world.open(step=5)
    await world.settle()
    assert not idle.done()

    sending = asyncio.create_task(world.send(opened))
    load = await idle
    assert isinstance(load, LoadOrder)
    assert (load.version, load.arena, load.source) == (2, opened.arena, LAYOUT)
    assert load.digests == {"a": 1, "b": 2}
    assert [copy.tensor for copy in load.copies] == ["a", "b"]
    assert not sending.done()
    waiting = asyncio.create_task(world.attend("e1", serving=1, verified=2, wait_s=30))
    sent = await sending

    assert (sent.members, sent.left_behind) == (1, 0)
    assert await waiting == Install(2, f"{5:032x}")
    assert state(world, 2) is VersionState.COMMITTED
    assert world.tracker.rows[-1]["members"] == 1


async def test_an_engine_that_does_not_verify_is_left_behind_at_the_deadline(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    sending = asyncio.create_task(world.publish())
    await world.settle()
    for _ in range(6):
        await world.pass_time(3)
        assert not sending.done()
        assert isinstance(await world.attend("e1", serving=1), LoadOrder)
    await world.pass_time(2)

    sent = await sending
    assert (sent.members, sent.left_behind) == (0, 1)
    assert isinstance(await world.attend("e1", serving=1), LoadOrder)
    assert isinstance(await world.attend("e1", serving=1, verified=2), Install)


async def test_a_silent_engine_is_waited_for_only_until_it_is_suspect(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    sending = asyncio.create_task(world.publish())
    await world.pass_time(7)
    assert not sending.done()
    await world.pass_time(1)

    assert (await sending).left_behind == 0


async def test_an_engine_whose_call_broke_is_not_waited_for(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    idle = asyncio.create_task(world.attend("e1", serving=1, wait_s=30))
    await world.settle()
    idle.cancel()
    await asyncio.wait([idle])

    await world.publish()
    assert state(world, 2) is VersionState.COMMITTED


async def test_an_older_call_that_breaks_does_not_hurt_an_engine_that_called_again(
    world: World,
) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    old = asyncio.create_task(world.attend("e1", serving=1, wait_s=30))
    await world.settle()
    await world.pass_time(1)
    assert await world.attend("e1", serving=1) is None
    old.cancel()
    await asyncio.wait([old])

    sending = asyncio.create_task(world.publish())
    await world.settle()
    assert not sending.done()
    assert await world.attend("e1", serving=1, verified=2) is None
    assert (await sending).members == 1


async def test_an_engine_that_failed_to_load_a_version_is_told_of_and_not_waited_for(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    sending = asyncio.create_task(world.publish())
    await world.settle()

    assert await world.attend("e1", serving=1, failed=2, failure="ARENA_CORRUPT") is None
    assert (await sending).left_behind == 1
    assert "engine e1 is serving: serves 1, failed to load 2 ARENA_CORRUPT" in caplog.text


async def test_a_draining_engine_gets_no_order_and_is_not_waited_for(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    assert await world.attend("e1", serving=1, draining=True) is None

    await world.publish()
    assert await world.attend("e1", serving=1, draining=True) is None
    assert not await world.wanted()


async def test_a_joiner_loads_the_committed_version_while_its_trainer_holds_it(
    world: World,
) -> None:
    await world.publish()

    await serve(world, "e1", 1)
    assert not await world.wanted(1)


async def test_a_joiner_serves_the_committed_version_before_the_one_in_flight(
    world: World,
) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    sending = asyncio.create_task(world.publish())
    await world.settle()

    assert (await world.attend("e2")).version == 1
    assert (await world.attend("e2", verified=1)).version == 1
    assert (await world.attend("e2", serving=1)).version == 2
    sending.cancel()


async def test_a_slow_engine_installs_what_it_has_before_it_loads_newer_ones(world: World) -> None:
    await world.publish(step=3)
    assert (await world.attend("e1")).version == 1
    await world.attend("e1", draining=True)
    await world.publish(step=4)
    await world.publish(step=5)

    assert await world.attend("e1", verified=1) == Install(1, f"{3:032x}")
    assert (await world.attend("e1", serving=1)).version == 3


async def test_a_verified_version_that_was_aborted_is_discarded(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    sending = asyncio.create_task(world.publish())
    await world.settle()
    waiting = asyncio.create_task(world.attend("e2", verified=2, wait_s=30))
    await world.settle()

    await world.open()

    assert await waiting == Discard(2)
    assert state(world, 2) is VersionState.ABORTED
    with pytest.raises(VersionEndedError):
        await sending


async def test_opening_is_keyed_by_its_request(world: World) -> None:
    first = await world.open(request_id="same")
    assert await world.open(request_id="same") is first
    sent = await world.send(first)
    assert (await world.open(request_id="same")).version == 1

    assert await world.send(first) is sent
    with pytest.raises(InvalidFieldError, match="step"):
        await world.open(step=9, request_id="same")
    with pytest.raises(InvalidFieldError, match="layout"):
        await world.open(request_id="same", layout=whole({"a": ("float32", (4,))}))


async def test_a_late_repeat_of_a_replaced_request_does_not_replace_its_successor(
    world: World,
) -> None:
    await world.open(request_id="old")
    new = await world.open(request_id="new")

    with pytest.raises(VersionEndedError):
        await world.open(request_id="old")
    assert (await world.send(new)).version == 2


async def test_a_fenced_trainer_neither_aborts_nor_commits(world: World) -> None:
    old = await world.open()
    world.ledger.trainer_epoch = 2
    new = await world.open()

    with pytest.raises(TrainerFencedError):
        await world.open(epoch=1)
    with pytest.raises(VersionEndedError):
        await world.send(old)
    assert (await world.send(new)).version == 2


async def test_a_version_of_a_trainer_that_is_fenced_while_it_waits_is_discarded(
    world: World,
) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    sending = asyncio.create_task(world.publish())
    await world.settle()
    world.ledger.trainer_epoch = 2

    assert await world.attend("e1", serving=1, verified=2) is None
    with pytest.raises(TrainerFencedError):
        await sending
    assert await world.attend("e1", serving=1, verified=2) == Discard(2)


async def test_a_version_that_is_never_sent_is_aborted(world: World) -> None:
    watching = asyncio.create_task(world.refit.watch())
    opened = await world.open()
    await world.pass_time(59)
    assert state(world, 1) is VersionState.ANNOUNCED
    await world.pass_time(2)

    assert state(world, 1) is VersionState.ABORTED
    with pytest.raises(VersionEndedError):
        await world.send(opened)
    watching.cancel()


async def test_a_sent_version_whose_trainer_is_gone_is_aborted(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    watching = asyncio.create_task(world.refit.watch())
    sending = asyncio.create_task(world.publish())
    await world.settle()
    sending.cancel()
    for _ in range(30):
        await world.attend("e1", serving=1)
        await world.pass_time(3)

    assert state(world, 2) is VersionState.ABORTED
    watching.cancel()


class Flaky:
    """A ledger whose answers get lost, or that is away."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.away = False
        self.loses_answers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def commit(self, **arguments: Any) -> None:
        if self.away:
            raise AwayError("away")
        await self.inner.commit(**arguments)
        if self.loses_answers:
            raise AwayError("answer lost")


class AwayError(TreadleError):
    kind = Kind.UNAVAILABLE
    reason = "PEER_AWAY"


async def test_a_commit_that_the_ledger_did_not_take_goes_on_when_sent_again(world: World) -> None:
    world.ledger = Flaky(world.ledger)
    world.ledger.away = True
    world.start_refit()
    opened = await world.open()
    with pytest.raises(AwayError):
        await world.send(opened)
    assert state(world, 1) is VersionState.ANNOUNCED

    world.ledger.away = False
    assert (await world.send(opened)).version == 1
    assert state(world, 1) is VersionState.COMMITTED


async def test_a_commit_whose_answer_was_lost_counts(world: World) -> None:
    world.ledger = Flaky(world.ledger)
    world.ledger.loses_answers = True
    world.start_refit()
    with pytest.raises(AwayError):
        await world.send(await world.open(step=7))

    await world.open(step=8)

    assert await world.attend("e1", verified=1) == Install(1, f"{7:032x}")


async def test_a_refit_that_restarts_knows_what_is_committed_and_asks_for_the_bytes(
    world: World,
) -> None:
    await world.publish(step=4)
    await serve(world, "e1", 1)
    world.start_refit()

    assert await world.attend("e1", serving=1) is None
    assert not await world.wanted(1)
    assert await world.attend("e2") is None
    assert await world.wanted(1)
    sending = asyncio.create_task(world.publish(step=4))
    await world.settle()
    assert not await world.wanted(1)
    assert (await world.attend("e2")).version == 2
    await world.attend("e1", serving=1, verified=2)
    await world.attend("e2", verified=2)
    assert (await sending).members == 2
    assert not await world.wanted(2)


async def test_a_refit_that_restarts_lets_a_verified_committed_version_be_installed(
    world: World,
) -> None:
    await world.publish()
    world.start_refit()

    assert await world.attend("e1", verified=1) == Install(1, "")


async def test_a_refit_that_restarts_has_a_verified_uncommitted_version_discarded(
    world: World,
) -> None:
    opened = await world.open()
    world.start_refit()

    assert await world.attend("e1", verified=1) == Discard(1)
    with pytest.raises(VersionEndedError):
        await world.send(opened)


async def test_what_another_refit_committed_is_learnt_from_the_ledger(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    other, world.refit = world.refit, None
    world.start_refit()
    await world.publish(step=2)
    world.refit = other

    assert await world.attend("e1", serving=2) is None
    assert await world.attend("e2", verified=2) == Install(2, "")
    assert await world.attend("e3") is None
    assert await world.wanted(2)


async def test_an_engine_that_serves_what_was_never_committed_is_refused(world: World) -> None:
    await world.open()

    with pytest.raises(InvalidFieldError, match="serving"):
        await world.attend("e1", serving=1)


async def test_demand_waits_for_an_engine_and_is_answered_by_a_publication(world: World) -> None:
    asking = asyncio.create_task(world.wanted(wait_s=30))
    await world.settle()
    assert not asking.done()

    await world.attend("e1")

    assert await asking
    await world.open()
    assert not await world.wanted()


async def test_an_engine_that_is_merely_slow_asks_for_nothing(world: World) -> None:
    await world.publish()
    for _ in range(20):
        assert isinstance(await world.attend("e1"), LoadOrder)
        await world.pass_time(5)
        assert not await world.wanted(1)


async def test_an_engine_that_fails_every_version_is_answered_ever_more_rarely(
    world: World,
) -> None:
    version = (await world.publish()).version
    for _ in range(600):
        await world.attend("e1", failed=version)
        if await world.wanted(version):
            sending = asyncio.create_task(world.publish())
            await world.settle()
            version += 1
            await world.attend("e1", failed=version)
            assert (await sending).left_behind == 1
        await world.pass_time(1)

    assert 5 <= version <= 16


async def test_the_first_failure_is_answered_at_once(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    assert (await world.attend("e2")).version == 1

    assert await world.attend("e2", failed=1, failure="ARENA_MISSING") is None
    assert await world.wanted(1)


async def test_a_dead_engine_asks_for_nothing_and_joins_anew(world: World) -> None:
    watching = asyncio.create_task(world.refit.watch())
    assert await world.attend("e1") is None
    await world.pass_time(16)
    assert not await world.wanted()
    assert not world.refit._fleet._engines

    assert await world.attend("e1") is None
    assert await world.wanted()
    watching.cancel()


@pytest.mark.parametrize(
    ("layout", "tensor"),
    [
        pytest.param(whole({"c": ("float32", (4,))}), "c", id="unknown-tensor"),
        pytest.param(whole({"a": ("bfloat16", (4,))}), "a", id="dtype"),
        pytest.param(whole({"b": ("float32", (2, 1))}), "b", id="shape"),
    ],
)
async def test_an_engine_that_no_version_fits_is_told_and_waited_for_by_nobody(
    world: World, layout: Layout, tensor: str
) -> None:
    await world.publish()

    with pytest.raises(LayoutMismatchError) as raised:
        await world.attend("e1", layout=layout)
    assert raised.value.field == tensor
    assert (await world.publish()).left_behind == 0
    assert not await world.wanted(2)


async def test_digests_that_are_not_the_layouts_are_refused_and_the_right_ones_taken(
    world: World,
) -> None:
    opened = await world.open()
    arguments = {"trainer_epoch": 1, "version": 1}

    with pytest.raises(InvalidFieldError, match=r"digests\[b\]"):
        await world.refit.send_version(digests={"a": 1}, **arguments)
    with pytest.raises(InvalidFieldError, match=r"digests\[c\]"):
        await world.refit.send_version(digests={"a": 1, "b": 2, "c": 3}, **arguments)
    with pytest.raises(InvalidFieldError, match="layout"):
        await world.open(layout=Layout(()))
    assert (await world.send(opened)).version == 1


async def test_closing_answers_every_call_that_waits_for_news(world: World) -> None:
    await world.publish()
    await serve(world, "e1", 1)
    calls = [
        asyncio.create_task(world.attend("e1", serving=1, wait_s=30)),
        asyncio.create_task(world.wanted(1, wait_s=30)),
    ]
    await world.settle()

    await world.refit.close()

    assert await asyncio.gather(*calls) == [None, False]
