"""Group commit, long polls, fencing, and what happens when an append fails."""

import asyncio
import contextlib
import threading

import pytest

from treadle_experience import keeper as keeper_module
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.core import results, steps, tickets
from treadle_experience.core.errors import (
    LedgerFailedError,
    LedgerFullError,
    StaleAttemptError,
    TaskSourceError,
    WriterFencedError,
)
from treadle_experience.core.state import RunState
from treadle_experience.keeper import Keeper


class GatedLedger(MemoryLedger):
    """Appends only while the gate is open, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.appends = []

    def append(self, transitions, writer_epoch) -> None:
        self.started.set()
        assert self.gate.wait(10)
        super().append(transitions, writer_epoch)
        self.appends.append(len(transitions))


@contextlib.asynccontextmanager
async def kept(world, ledger=None, **options):
    """A Keeper with its writer running; the world's own run is what it decides on."""
    ledger = ledger or MemoryLedger()
    epoch = ledger.acquire("run")
    ledger.append(world.save(), epoch)
    keeper = Keeper(world.fresh_run(), ledger, **options)
    writer = asyncio.ensure_future(keeper.write())
    try:
        yield keeper
    finally:
        writer.cancel()
        await asyncio.gather(writer, return_exceptions=True)
        keeper.close()


def lease(most=1, replica="r1"):
    return lambda run: tickets.lease(
        run, replica_id=replica, served_version=1, max_tickets=most, slots=8
    )


async def until(holds) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110, the keeper rings no bell for tests
            await asyncio.sleep(0.001)


async def test_an_answer_waits_until_what_it_saw_is_durable(make_world) -> None:
    ledger = GatedLedger()
    async with kept(make_world().start(), ledger) as keeper:
        durable = keeper.position
        ledger.gate.clear()
        mutation = asyncio.ensure_future(keeper.ask(lease()))
        await asyncio.to_thread(ledger.started.wait, 5)
        read = asyncio.ensure_future(keeper.ask(lambda run: run.state.position))
        refusal = asyncio.ensure_future(
            keeper.ask(lambda run: (_ for _ in ()).throw(StaleAttemptError("late")))
        )
        done, _ = await asyncio.wait([mutation, read, refusal], timeout=0.02)

        assert done == set()
        ledger.gate.set()
        assert len(await mutation) == 1
        assert await read == keeper.position > durable
        with pytest.raises(StaleAttemptError):
            await refusal


async def test_what_is_decided_during_an_append_goes_into_the_next_one(make_world) -> None:
    ledger = GatedLedger()
    async with kept(make_world(max_lag=9).start(), ledger) as keeper:
        ledger.gate.clear()
        ledger.started.clear()
        first = asyncio.ensure_future(keeper.ask(lease()))
        await asyncio.to_thread(ledger.started.wait, 5)
        others = [asyncio.ensure_future(keeper.ask(lease(replica=f"r{i}"))) for i in range(20)]
        await asyncio.sleep(0)
        before = len(ledger.appends)
        ledger.gate.set()
        leased = await asyncio.gather(first, *others)

        assert len(ledger.appends) - before == 2
        assert len({ticket.episode_id for each in leased for ticket in each}) == 21


async def test_a_successor_holds_the_state_that_was_answered(make_world) -> None:
    ledger = MemoryLedger()
    world = make_world().start()
    async with kept(world, ledger) as keeper:
        await keeper.ask(lease(3))
        state: RunState = await keeper.ask(lambda run: run.state)

        successor = world.fresh_run()
        successor.load(ledger.load())

        assert successor.state == state


async def churn(keeper, times) -> None:
    """Makes a journal longer, and no state larger."""
    for _ in range(times):
        for ticket in await keeper.ask(lease()):
            await keeper.ask(tickets.give_back, replica_id="r1", attempts=[ticket])


class CountingLedger(MemoryLedger):
    """Counts how often it is condensed."""

    def __init__(self) -> None:
        super().__init__()
        self.condensations = 0

    def condense(self, head, position, writer_epoch) -> None:
        super().condense(head, position, writer_epoch)
        self.condensations += 1


async def test_a_long_journal_is_condensed_and_a_successor_holds_the_same(make_world) -> None:
    ledger = CountingLedger()
    world = make_world(condense_after=40).start()
    async with kept(world, ledger) as keeper:
        await churn(keeper, 60)
        await until(lambda: ledger.condensations > 1)
        state = await keeper.ask(lambda run: run.state)

        successor = world.fresh_run()
        length = successor.load(ledger.load())

        assert successor.state == state
        assert length < state.position / 2
        assert ledger.condensations < 10


async def test_a_ledger_without_room_is_condensed_later(make_world) -> None:
    class NarrowLedger(CountingLedger):
        narrow = True

        def condense(self, head, position, writer_epoch) -> None:
            if self.narrow:
                self.narrow = False
                raise LedgerFullError("no room")
            super().condense(head, position, writer_epoch)

    ledger = NarrowLedger()
    async with kept(make_world(condense_after=20).start(), ledger) as keeper:
        await churn(keeper, 40)
        assert keeper.is_able
        await until(lambda: ledger.condensations)


async def test_a_writer_that_is_fenced_as_it_condenses_ends(make_world) -> None:
    class OvertakenLedger(MemoryLedger):
        def condense(self, head, position, writer_epoch) -> None:
            self.acquire("run")
            super().condense(head, position, writer_epoch)

    ledger = OvertakenLedger()
    async with kept(make_world(condense_after=1).start(), ledger) as keeper:
        with pytest.raises(WriterFencedError):
            await churn(keeper, 40)
        assert not keeper.is_able


async def test_a_writer_that_was_fenced_answers_so_and_ends(make_world) -> None:
    ledger = MemoryLedger()
    async with kept(make_world().start(), ledger) as keeper:
        ledger.acquire("run")

        with pytest.raises(WriterFencedError):
            await keeper.ask(lease())
        with pytest.raises(WriterFencedError):
            await keeper.ask(lambda run: run.state.position)


async def test_an_append_that_fails_acknowledges_nothing_and_ends_the_writer(make_world) -> None:
    class FullLedger(MemoryLedger):
        def append(self, transitions, writer_epoch) -> None:
            raise OSError(28, "No space left on device")

    world = make_world()
    ledger = FullLedger()
    keeper = Keeper(world.fresh_run(), ledger)
    call = asyncio.ensure_future(keeper.ask(lambda run: run.state.position))

    with pytest.raises(LedgerFailedError, match="No space left"):
        await keeper.write()
    later = asyncio.ensure_future(keeper.ask(lambda run: run.state.position))
    done, pending = await asyncio.wait([call, later], timeout=0.02)

    assert done == set()
    for task in pending:
        task.cancel()
    keeper.close()


class SmallLedger(MemoryLedger):
    """Has no room while it is full."""

    full = False

    def append(self, transitions, writer_epoch) -> None:
        if self.full:
            raise LedgerFullError("no room", field="ledger")
        super().append(transitions, writer_epoch)


async def test_a_full_ledger_refuses_all_and_what_was_decided_is_stored_later(
    make_world, monkeypatch
) -> None:
    monkeypatch.setattr(keeper_module, "FULL_RETRY_S", 0.01)
    ledger = SmallLedger()
    async with kept(make_world(max_lag=9).start(), ledger) as keeper:
        before = keeper.position
        ledger.full = True
        with pytest.raises(LedgerFullError) as decided:
            await keeper.ask(lease())
        with pytest.raises(LedgerFullError):
            await keeper.ask(lambda run: run.state.position)
        with pytest.raises(LedgerFullError):
            await keeper.poll(lease(), bool, wait_s=20)
        assert (keeper.is_able, keeper.position) == (False, before)

        ledger.full = False
        await until(lambda: keeper.is_able)

        assert decided.value.retry_after_s == 0.01
        running = await keeper.ask(lambda run: dict(run.state.running))
        assert [len(episodes) for episodes in running.values()] == [1]
        assert len(list(ledger.load())) == keeper.position


async def test_leases_stand_still_while_the_ledger_is_full(make_world, monkeypatch) -> None:
    monkeypatch.setattr(keeper_module, "FULL_RETRY_S", 0.01)
    ledger, world = SmallLedger(), make_world(lease_s=0.2).start()
    (ticket,) = world.lease(1, 1)
    async with kept(world, ledger) as keeper:
        state: RunState = await keeper.ask(lambda run: run.state)
        episode = state.episodes[ticket.episode_id]
        sweeper = asyncio.ensure_future(keeper.sweep())
        ledger.full = True
        with pytest.raises(LedgerFullError):
            await keeper.ask(lease())
        await asyncio.sleep(0.4)  # twice the lease
        ledger.full = False
        await until(lambda: keeper.is_able)

        assert episode.state == "issued"
        await until(lambda: episode.state != "issued")
        assert episode.ended == "expired"
        sweeper.cancel()
        await asyncio.gather(sweeper, return_exceptions=True)


async def test_a_full_ledger_does_not_hold_up_a_drain(make_world) -> None:
    ledger = SmallLedger()
    async with kept(make_world().start(), ledger) as keeper:
        ledger.full = True
        with pytest.raises(LedgerFullError):
            await keeper.ask(lease())

        async with asyncio.timeout(5):
            await keeper.drain()


async def test_a_broken_promise_ends_the_writer_and_stores_nothing_of_the_decision(
    make_world,
) -> None:
    world = make_world().start()
    ledger = MemoryLedger()
    ledger.append(world.save(), ledger.acquire("run"))
    run = world.fresh_run()
    run.sources = {"": lambda cursor: None if cursor else 1 / 0}
    keeper = Keeper(run, ledger)
    writer = asyncio.ensure_future(keeper.write())

    with pytest.raises(TaskSourceError, match="ZeroDivisionError"):
        await keeper.ask(lease())
    with pytest.raises(TaskSourceError):
        await writer

    assert len(list(ledger.load())) == len(world.journal)
    keeper.close()


async def test_a_poll_wakes_when_its_answer_changes(make_world, tools) -> None:
    world = make_world().start()
    leased = world.lease(1)
    for ticket in leased[1:]:
        world.complete(ticket)
    async with kept(world) as keeper:
        claim = asyncio.ensure_future(
            keeper.poll(
                lambda run: steps.claim(run, trainer_epoch=1, step=1),
                lambda claim: bool(claim.tasks),
                wait_s=20,
            )
        )
        await asyncio.sleep(0)
        assert not claim.done()
        await keeper.ask(
            lambda run: results.complete(
                run,
                replica_id="r1",
                attempt=tools.attempt(leased[0]),
                result=tools.result(),
                inline=b"payload",
            )
        )

        async with asyncio.timeout(5):
            assert len((await claim).tasks) == 2


async def test_a_poll_answers_when_its_time_is_over_or_the_process_drains(make_world) -> None:
    world = make_world().start()
    world.lease(1)
    async with kept(world) as keeper:
        nothing = await keeper.poll(lease(), bool, wait_s=0.01)
        waiting = asyncio.ensure_future(keeper.poll(lease(), bool, wait_s=20))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await keeper.drain()
            drained = await waiting

        assert (nothing, drained) == ([], [])


async def test_the_sweeper_ends_leases_that_nobody_renews(make_world, tools) -> None:
    world = make_world(lease_s=0.02).start()
    kept_ticket, lost = world.lease(1, 2)
    async with kept(world) as keeper:
        sweeper = asyncio.ensure_future(keeper.sweep())
        state: RunState = await keeper.ask(lambda run: run.state)

        async with asyncio.timeout(5):
            while state.episodes[lost.episode_id].state == "issued":
                keeper.renew([tools.attempt(kept_ticket)])
                await asyncio.sleep(0.002)

        assert state.episodes[lost.episode_id].ended == "expired"
        sweeper.cancel()
        await asyncio.gather(sweeper, return_exceptions=True)


async def test_followers_see_each_transition_once_it_is_durable(make_world) -> None:
    ledger, seen = GatedLedger(), []
    async with kept(make_world().start(), ledger, on_durable=seen.append) as keeper:
        await keeper.ask(lease(2))
        loaded = list(ledger.load())

        assert seen == loaded[-len(seen) :]
        assert len(seen) == 3  # a task and two tickets


async def test_the_time_of_appends_is_counted(make_world) -> None:
    now = [0.0]

    class SlowLedger(MemoryLedger):
        def append(self, transitions, writer_epoch) -> None:
            super().append(transitions, writer_epoch)
            now[0] += 2.0

    async with kept(make_world(max_lag=9).start(), SlowLedger(), clock=lambda: now[0]) as keeper:
        await keeper.ask(lease())
        now[0] += 1.0
        await keeper.ask(lease())

        row = keeper.row()
        assert row.pop("journal") == keeper.position
        assert row == {"append_s": 4.0, "up_s": 5.0, "durability": "none"}
