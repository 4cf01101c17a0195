"""Versions without bytes, and versions that outlive their trainer."""

import asyncio
from typing import Any

import numpy as np
import pytest

from treadle_core.errors import InvalidFieldError
from treadle_core.versions import VersionState
from treadle_refit.core.errors import VersionEndedError
from treadle_refit.core.fleet import EngineState
from treadle_refit.core.orders import Alias, Install
from treadle_refit.core.publication import Publication
from treadle_weights.digests import weights_digest
from treadle_weights.files import Files
from treadle_weights.layouts import whole
from treadle_weights.transport import LoadOrder, WeightSender

World = Any
DIGESTS = {"a": 1, "b": 2}
LAYOUT = whole({"a": ("float32", (4,)), "b": ("float32", (2,))})


async def publish(world: World) -> Publication:
    """Version 1, whose bytes lie in its arena."""
    opened = await world.open()
    world.fill(opened.arena)
    return await world.send(opened)


async def alias(world: World, base: Publication, **other: Any) -> Publication:
    world.requests += 1
    arguments: dict[str, Any] = {
        "trainer_epoch": world.ledger.trainer_epoch,
        "step": 7,
        "request_id": f"request-{world.requests}",
        "layout": LAYOUT,
        "trace_id": f"{7:032x}",
        "alias_of": base.version,
        "weights": weights_digest(base.digests),
    }
    return await world.refit.open_version(**(arguments | other))


async def test_an_alias_moves_no_bytes_and_its_base_is_enough(world: World) -> None:
    base = await publish(world)
    assert isinstance(await world.attend("e1", verified=1), Install)
    assert await world.attend("e1", serving=1) is None

    opened = await alias(world, base)
    assert (opened.version, opened.aliased, opened.arena) == (2, True, base.arena)
    assert await world.attend("e1", serving=1) is None, "it is not committed"
    sent = await world.send(opened)

    assert (sent.members, sent.left_behind) == (1, 0)
    assert world.ledger.versions[2].state is VersionState.COMMITTED
    assert world.ledger.versions[2].step == 7
    assert world.ledger.versions[2].weights_digest == world.ledger.versions[1].weights_digest
    assert await world.attend("e1", serving=1) == Alias(2, 1, f"{7:032x}")
    assert await world.attend("e1", serving=2) is None
    row = world.tracker.rows[-1]
    assert (row["bytes"], row["aliased"]) == (0, 1)


async def test_who_missed_an_alias_gets_the_next_and_who_has_another_base_gets_bytes(
    world: World,
) -> None:
    base = await publish(world)
    for engine in ("here", "behind"):
        await world.attend(engine, serving=1 if engine == "here" else 0)
    second = await alias(world, base)
    sending = asyncio.create_task(world.send(second))
    await world.settle()
    assert not sending.done(), "it waits for the engine that needs bytes"
    load = await world.attend("behind")
    assert isinstance(load, LoadOrder)
    assert (load.version, load.arena, load.digests) == (1, base.arena, DIGESTS)
    await world.attend("behind", verified=1)
    await world.attend("behind", serving=1)
    second = await sending

    third = await world.send(await alias(world, second))
    assert await world.attend("here", serving=1) == Alias(3, 1, f"{7:032x}")
    assert await world.attend("behind", serving=2) == Alias(3, 2, f"{7:032x}")
    late = await world.attend("late")
    assert isinstance(late, LoadOrder)
    assert (late.version, late.arena) == (3, base.arena)
    assert third.same == {1, 2}


@pytest.mark.parametrize("weights", ["0" * 16, ""])
async def test_an_alias_of_other_weights_is_refused_and_uses_no_number(
    world: World, weights: str
) -> None:
    base = await publish(world)
    with pytest.raises(InvalidFieldError, match="weights_digest"):
        await alias(world, base, weights=weights)
    assert len(world.ledger.versions) == 1


async def test_an_alias_is_sent_with_the_digests_of_its_base(world: World) -> None:
    opened = await alias(world, await publish(world))
    with pytest.raises(InvalidFieldError, match="digests"):
        await world.refit.send_version(
            trainer_epoch=1, version=opened.version, digests=DIGESTS | {"a": 5}
        )
    assert (await world.send(opened)).version == 2


async def test_a_version_whose_base_is_not_there_is_like_any_other(world: World) -> None:
    base = await publish(world)
    older = await alias(world, base, alias_of=9)
    assert not older.aliased
    world.directory.joinpath("treadle.run.1").unlink()
    gone = await alias(world, base)
    assert not gone.aliased
    assert gone.arena.path.endswith(".3")
    world.start_refit()
    assert not (await alias(world, base)).aliased


async def test_an_alias_opened_again_is_the_same_and_one_of_another_layout_is_refused(
    world: World,
) -> None:
    base = await publish(world)
    opened = await alias(world, base, request_id="r")
    assert await alias(world, base, request_id="r") == opened
    other = whole({"a": ("float32", (4,))})
    with pytest.raises(InvalidFieldError, match="layout"):
        await alias(world, base, request_id="r", layout=other)


# Versions that outlive their trainer


@pytest.fixture
def files(world: World) -> Files:
    transport = Files(world.directory)
    world.transport = transport
    world.start_refit()
    return transport


async def published(world: World, sender: WeightSender, value: float) -> Publication:
    opened = await world.open()
    tensors = {"a": np.full(4, value, np.float32), "b": np.full(2, value, np.float32)}
    digests = sender.send(opened.arena, LAYOUT, tensors.items())
    sent = await world.refit.send_version(trainer_epoch=1, version=opened.version, digests=digests)
    sender.keep(opened.arena)
    return sent


async def test_an_engine_gets_the_newest_committed_version_of_a_refit_and_a_trainer_that_ended(
    world: World, files: Files
) -> None:
    sender = files.sender("run")
    await published(world, sender, 1.0)
    sent = await published(world, sender, 2.0)
    aborted = await world.open()
    sender.close()

    world.start_refit()
    order = await world.attend("e1")

    assert isinstance(order, LoadOrder)
    assert (order.version, order.digests) == (2, sent.digests)
    assert aborted.version == 3
    assert isinstance(await world.attend("e1", verified=2), Install)
    assert not await world.wanted()


async def test_a_commit_that_only_the_ledger_heard_of_is_answered_when_it_is_sent_again(
    world: World, files: Files
) -> None:
    sent = await published(world, files.sender("run"), 1.0)
    world.start_refit()

    again = await world.refit.send_version(trainer_epoch=1, version=1, digests=sent.digests)

    assert again.version == 1
    assert len(world.ledger.versions) == 1


@pytest.mark.parametrize("damage", ["gone", "cut", "other"])
async def test_what_is_not_what_was_committed_is_asked_of_the_trainer(
    world: World, files: Files, damage: str
) -> None:
    sender = files.sender("run")
    sent = await published(world, sender, 1.0)
    path = world.directory / "run.1.safetensors"
    match damage:
        case "gone":
            path.unlink()
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case _:
            tensors = {"a": np.zeros(4, np.float32), "b": np.zeros(2, np.float32)}
            sender.send(sent.arena, LAYOUT, tensors.items())
    world.start_refit()

    assert await world.attend("e1") is None
    assert await world.wanted()
    with pytest.raises(VersionEndedError):
        await world.refit.send_version(trainer_epoch=1, version=1, digests=sent.digests)


async def test_an_alias_outlives_its_trainer_too(world: World, files: Files) -> None:
    base = await published(world, files.sender("run"), 1.0)
    opened = await alias(world, base)
    await world.refit.send_version(trainer_epoch=1, version=2, digests=base.digests)
    world.start_refit()

    order = await world.attend("e1")

    assert isinstance(order, LoadOrder)
    assert (order.version, order.arena.path) == (2, opened.arena.path)


# Membership


async def test_the_suspect_serve_again_if_they_missed_no_commit_and_the_dead_sync_first(
    world: World,
) -> None:
    def state() -> EngineState:
        return world.refit._fleet.state("e1", world.ledger._newest(), world.now)

    await publish(world)
    await world.attend("e1", serving=1)
    assert state() is EngineState.SYNCING
    await world.attend("e1", serving=1)
    assert state() is EngineState.SERVING

    await world.pass_time(8)
    assert state() is EngineState.SUSPECT
    await world.attend("e1", serving=1)
    assert state() is EngineState.SERVING

    await world.pass_time(8)
    await world.publish()
    await world.attend("e1", serving=1)
    assert state() is EngineState.SYNCING
    await world.attend("e1", serving=2)
    assert state() is EngineState.SERVING

    await world.pass_time(15)
    world.refit._fleet.bury(world.now)
    assert state() is EngineState.DEAD
    await world.attend("e1", serving=2)
    assert state() is EngineState.SYNCING
    await world.attend("e1", serving=2)
    assert state() is EngineState.SERVING
