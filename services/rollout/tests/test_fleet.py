import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_core.errors import Kind
from treadle_rollout import fleet as fleet_module
from treadle_rollout.adapters.memory_refit import MemoryRefit
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.fleet import Fleet
from treadle_rollout.ports import Alias, Discard, Install, Membership, Order
from treadle_runtime.errors import PEER_AWAY, RemoteError
from treadle_weights.layouts import Layout, whole
from treadle_weights.plan import plan
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.transport import Arena, LoadOrder

LAYOUT = whole({"bigrams": ("float32", (4, 4))})
WEIGHTS = np.arange(16, dtype=np.float32).reshape(4, 4)


@dataclass
class Member:
    """An engine in a fleet whose refit says what the test says."""

    engine: ScriptedEngine
    refit: MemoryRefit
    leaving: asyncio.Event
    done: asyncio.Event
    task: "asyncio.Task[None]"
    rows: list[dict[str, Any]]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_AWAY_S", 0.02)
    monkeypatch.setattr(fleet_module, "_AGAIN_S", 0.01)


@pytest.fixture
def transport(tmp_path: Path) -> SharedMemory:
    return SharedMemory(tmp_path)


class Rows(list[dict[str, Any]]):
    """Tracker that keeps its rows."""

    def log(self, name: str, values: Mapping[str, float | int | str]) -> None:
        self.append({"name": name, **values})


@pytest.fixture
async def member(transport: SharedMemory) -> AsyncGenerator[Member]:
    engine, refit = ScriptedEngine(vocabulary=4), MemoryRefit()
    leaving, done = asyncio.Event(), asyncio.Event()
    rows = Rows()
    fleet = Fleet(engine, refit, transport.receiver(), leaving=leaving, done=done, tracker=rows)
    task = asyncio.create_task(fleet.run())
    yield Member(engine, refit, leaving, done, task, rows)
    done.set()
    await asyncio.wait({task}, timeout=5)
    task.cancel()


@pytest.fixture
def order(transport: SharedMemory) -> Callable[..., LoadOrder]:
    sender = transport.sender("run")

    def send(version: int, **changed: int) -> LoadOrder:
        arena = transport.arena("run", version, LAYOUT.size())
        digests = sender.send(arena, LAYOUT, [("bigrams", WEIGHTS * version)])
        return LoadOrder(version, arena, LAYOUT, plan(LAYOUT, LAYOUT), digests | changed)

    return send


async def told(member: Member, order: Order | None, **says: object) -> Membership:
    """Gives an order and waits until the engine says something that follows."""
    async with asyncio.timeout(20):
        member.refit.give(order)
        return await member.refit.hears(**says)


async def test_a_version_is_verified_first_and_served_when_it_is_installed(
    member: Member, order: Callable[..., LoadOrder]
) -> None:
    for version in (1, 2):
        said = await told(member, order(version), verified=version)
        assert said.serving == version - 1
        assert member.engine.served_version == version - 1
        arrived = member.engine.arrival.view(np.float32).reshape(4, 4)
        assert arrived.tolist() == (WEIGHTS * version).tolist()
        await told(member, Install(version, "0" * 31 + "1"), serving=version, verified=0)
        assert member.engine.served_version == version


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        pytest.param(lambda o: replace(o, digests={"bigrams": 1}), "ARENA_CORRUPT", id="digest"),
        pytest.param(
            lambda o: replace(o, arena=Arena(o.arena.path + "x", o.arena.size)),
            "ARENA_MISSING",
            id="gone",
        ),
        pytest.param(
            lambda o: replace(o, arena=Arena("/etc/passwd", 9)), "INVALID_FIELD", id="elsewhere"
        ),
    ],
)
async def test_a_version_that_cannot_be_verified_is_reported_and_the_next_one_loads(
    member: Member, order: Callable[..., LoadOrder], broken: Any, reason: str
) -> None:
    said = await told(member, broken(order(1)), failed=1)
    assert said.failure.startswith(reason)
    assert (said.verified, said.serving) == (0, 0)
    said = await told(member, order(2), verified=2)
    assert (said.failed, said.failure) == (0, "")


async def test_an_install_of_what_is_not_verified_changes_nothing(
    member: Member, order: Callable[..., LoadOrder]
) -> None:
    await told(member, order(1), verified=1)
    await told(member, Install(7, ""), verified=1)
    await told(member, Discard(7), verified=1)
    assert member.engine.served_version == 0
    await told(member, Discard(1), verified=0)
    assert not member.task.done()


async def test_an_alias_is_served_without_bytes_by_who_serves_its_base(
    member: Member, order: Callable[..., LoadOrder]
) -> None:
    await told(member, order(1), verified=1)
    await told(member, Install(1, ""), serving=1, verified=0)
    await told(member, Alias(3, 2, ""), serving=1)
    assert member.engine.served_version == 1

    await told(member, Alias(3, 1, "0" * 31 + "1"), serving=3, verified=0)

    assert member.engine.served_version == 3
    assert [(row["version"], row["bytes"], row["aliased"]) for row in member.rows] == [
        (1, 64, 0),
        (3, 0, 1),
    ]
    assert all(row["install_s"] >= 0 for row in member.rows)
    await told(member, order(4), verified=4)


async def test_a_draining_engine_says_so_at_once_and_says_good_bye(member: Member) -> None:
    await told(member, None, draining=False)
    member.leaving.set()
    await member.refit.hears(draining=True)
    member.done.set()
    async with asyncio.timeout(20):
        await member.task


async def test_an_engine_outlives_refit_but_not_a_trainer_of_another_model() -> None:
    class Away(MemoryRefit):
        async def attend(self, member: Membership, layout: Layout, *, wait_s: float) -> None:
            self.heard.append(member)
            raise refusals[min(len(self.heard), len(refusals)) - 1]

    refusals = [
        RemoteError(Kind.UNAVAILABLE, PEER_AWAY, "not reached"),
        RemoteError(Kind.PRECONDITION, "WRITER_FENCED", "the ledger's, passed on"),
        RemoteError(Kind.PRECONDITION, "LAYOUT_MISMATCH", "no such tensor"),
    ]
    refit, done = Away(), asyncio.Event()
    receiver = SharedMemory().receiver()
    fleet = Fleet(
        ScriptedEngine(vocabulary=4),
        refit,
        receiver,
        leaving=asyncio.Event(),
        done=done,
        tracker=Rows(),
    )
    with pytest.raises(RemoteError, match="no such tensor"):
        await fleet.run()
    assert len(refit.heard) == 3


async def test_a_long_load_is_no_silence(order: Callable[..., LoadOrder], monkeypatch: Any) -> None:
    monkeypatch.setattr("treadle_rollout.fleet.BEAT_S", 0.01)
    loaded = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Slow:
        def receive(self, order: LoadOrder, target: Layout, buffer: np.ndarray) -> None:
            asyncio.run_coroutine_threadsafe(loaded.wait(), loop).result(5)

    refit, done = MemoryRefit(), asyncio.Event()
    refit.give(order(1))
    fleet = Fleet(
        ScriptedEngine(vocabulary=4),
        refit,
        Slow(),
        leaving=asyncio.Event(),
        done=done,
        tracker=Rows(),
    )
    task = asyncio.create_task(fleet.run())
    async with asyncio.timeout(20):
        while len(refit.heard) < 4:  # noqa: ASYNC110, several calls, and no event for them
            await asyncio.sleep(0.01)
        assert {member.verified for member in refit.heard} == {0}
        loaded.set()
        await refit.hears(verified=1)
        done.set()
        await task


@pytest.mark.parametrize(
    "backwards", [lambda load: load, lambda _: Install(1, ""), lambda _: Alias(1, 2, "")]
)
async def test_no_order_takes_an_engine_to_an_older_version(
    member: Member, order: Callable[..., LoadOrder], backwards: Callable[[LoadOrder], Order]
) -> None:
    old = order(1)
    await told(member, order(2), verified=2)
    await told(member, Install(2, ""), serving=2, verified=0)

    said = await told(member, backwards(old), failed=1)

    assert said.failure == "VERSION_BACK: version 1 comes after 2"
    assert (said.serving, member.engine.served_version) == (2, 2)
    await told(member, order(3), verified=3, failed=0)


async def test_a_row_says_where_the_time_of_a_version_went(
    member: Member, order: Callable[..., LoadOrder]
) -> None:
    await told(member, order(1), verified=1)
    await told(member, Install(1, ""), serving=1, verified=0)

    (row,) = member.rows
    parts = row["wire_s"] + row["place_s"] + row["verify_s"]
    assert 0 < parts <= row["load_s"]
    assert (row["encoding"], row["wire_bytes"], row["group_epoch"]) == ("dense", 0, 0)
