"""The payload store follows the ledger: nothing needed goes, and nothing unneeded stays."""

import asyncio
import contextlib
import os
import threading
import time

import pytest

from treadle.episode.v1 import episode_pb2
from treadle_core.errors import PayloadMissingError
from treadle_experience.adapters.memory import MemoryLedger
from treadle_experience.core.errors import WriterFencedError
from treadle_experience.core.run import Run
from treadle_experience.core.state import Result
from treadle_experience.custody import Custody
from treadle_experience.keeper import Keeper
from treadle_payloads.files import FileStore
from treadle_payloads.store import IDLE_S, Hold, PayloadReference


class Fixture:
    """A custody over files, with a ledger that can be taken away."""

    def __init__(self, world, store: FileStore) -> None:
        self.run = Run(world.rules, world.run.sources)
        self.ledger = MemoryLedger()
        self.keeper = Keeper(self.run, self.ledger)
        self.store = store
        self.released: asyncio.Queue[Hold] = asyncio.Queue()
        self.custody = Custody(self.keeper, store, self.released, limit=0)

    def age(self, reference: PayloadReference) -> None:
        long_ago = time.time() - IDLE_S - 1
        os.utime(self.store.path(reference.sha256), (long_ago, long_ago))


@pytest.fixture
def make_custody(make_world, tmp_path):
    @contextlib.asynccontextmanager
    async def make(store: FileStore | None = None):
        made = Fixture(make_world(), store or FileStore(tmp_path))
        writer = asyncio.ensure_future(made.keeper.write())
        await made.keeper.ask(lambda run: None)
        try:
            yield made
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            made.keeper.close()
            made.custody.close()

    return make


def result_of(reference: PayloadReference) -> Result:
    return Result(
        reward=1.0,
        termination="finished",
        metrics={},
        turn_rewards=(),
        num_tokens=1,
        num_trained=0,
        versions=(),
        traceparent="",
        sha256=reference.sha256,
        size=reference.size,
        inlined=False,
    )


NOTHING = episode_pb2.Payload()


async def test_what_a_release_lets_go_goes(make_custody) -> None:
    async with make_custody() as made:
        reference = made.store.put(b"tokens")
        made.released.put_nowait(Hold(reference, "e1"))

        await made.custody.finish()

        assert not made.store.has(reference)


async def test_what_another_result_needs_stays(make_custody) -> None:
    async with make_custody() as made:
        reference = made.store.put(b"tokens")
        made.run.state.references[reference.sha256] = 1
        made.released.put_nowait(Hold(reference, "e1"))

        await made.custody.finish()

        assert made.store.has(reference)


async def test_what_arrives_is_neither_released_nor_swept(make_custody) -> None:
    async with make_custody() as made:
        reference = made.store.put(b"tokens")
        made.age(reference)

        async with made.custody.taken(NOTHING, result_of(reference), "e2"):
            made.released.put_nowait(Hold(reference, "e1"))
            await made.custody.finish()
            assert await made.custody.sweep_once() == 0
            assert await made.custody.unneeded([reference.sha256]) == []

        assert made.store.has(reference)
        assert await made.custody.unneeded([reference.sha256]) == [reference.sha256]


class SlowStore(FileStore):
    """Files whose deletion takes as long as the test wants."""

    def __init__(self, directory) -> None:
        super().__init__(directory)
        self.deleting, self.go_on = threading.Event(), threading.Event()

    def release(self, holds, *, writer_epoch: int = 0) -> None:
        self.deleting.set()
        assert self.go_on.wait(30)
        super().release(holds, writer_epoch=writer_epoch)


async def test_who_comes_while_it_goes_has_to_put_it_again(make_custody, tmp_path) -> None:
    store = SlowStore(tmp_path)
    async with make_custody(store) as made:
        reference = store.put(b"tokens")
        made.released.put_nowait(Hold(reference, "e1"))
        releasing = asyncio.ensure_future(made.custody.finish())
        await asyncio.to_thread(store.deleting.wait, 30)

        with pytest.raises(PayloadMissingError) as raised:
            async with made.custody.taken(NOTHING, result_of(reference), "e2"):
                pass

        assert raised.value.field == "result.payload.sha256"
        store.go_on.set()
        await releasing
        store.put(b"tokens")
        async with made.custody.taken(NOTHING, result_of(reference), "e2") as (result, inline):
            assert (result.inlined, inline) == (False, None)


async def test_only_what_is_old_and_unneeded_is_swept(make_custody) -> None:
    async with make_custody() as made:
        old, needed, young = (made.store.put(data) for data in (b"old", b"needed", b"young"))
        for reference in (old, needed):
            made.age(reference)
        made.run.state.references[needed.sha256] = 1

        assert await made.custody.sweep_once() == 1

        assert [made.store.has(each) for each in (old, needed, young)] == [False, True, True]


async def test_what_is_put_again_is_not_swept(make_custody) -> None:
    async with make_custody() as made:
        reference = made.store.put(b"tokens")
        made.age(reference)
        (stay,) = made.store.idle()

        made.store.put(b"tokens")

        assert not made.store.drop(stay)
        assert list(made.store.idle()) == []
        assert made.store.has(reference)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_writer_that_was_replaced_sweeps_nothing(make_custody) -> None:
    async with make_custody() as made:
        reference = made.store.put(b"tokens")
        made.age(reference)
        made.ledger.acquire(made.run.rules.run_id)

        await made.custody.sweep_once()

        assert made.store.has(reference)
        with pytest.raises(WriterFencedError):
            await made.keeper.verify()
