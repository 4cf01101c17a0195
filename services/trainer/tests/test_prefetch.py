"""Reading ahead: what was expected is there, and what was not costs nothing but bytes."""

import asyncio
import threading
from dataclasses import replace

import pytest

from treadle_core.errors import PayloadMissingError
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.claims import Claim, ComingStep
from treadle_trainer.prefetch import Prefetched, Prefetching


class Counting:
    """Payloads that note what is read of them, and wait for leave to."""

    def __init__(self, payloads):
        self._payloads = payloads
        self.calls = []
        self.begun = threading.Event()
        self.leave = threading.Event()
        self.leave.set()
        self.lacking = set()

    def read(self, episodes):
        self.begun.set()
        self.leave.wait(20)
        self.calls.append([episode.episode_id for episode in episodes])
        if self.lacking & {episode.episode_id for episode in episodes}:
            return [PayloadMissingError("gone", field="sha256") for _ in episodes]
        return self._payloads.read(episodes)


@pytest.fixture
def episodes(make_run):
    """Episodes of one batch whose payloads lie in the store, and what reads them."""
    run = make_run(1, rewards=((1.0,), (0.0, 1.0, 0.5, 0.25)))
    found = [e for e in run.experience.batches[0][1].episodes if e.inline is None]
    assert len(found) == 4
    return found, Counting(run.payloads)


async def ahead(prefetched):
    """Waits until all that is expected was read ahead."""
    await asyncio.to_thread(prefetched.drain)


def same(found, wanted):
    return [[s.token_ids.tolist() for s in read] for read in found] == [
        [s.token_ids.tolist() for s in read] for read in wanted
    ]


async def test_what_was_expected_is_read_once_and_ahead(episodes):
    wanted, counting = episodes
    prefetched = Prefetched(counting, 1 << 20)
    prefetched.expect(wanted[:3])
    await ahead(prefetched)

    found = prefetched.read(wanted)

    assert same(found, counting._payloads.read(wanted))
    assert counting.calls == [*([e.episode_id] for e in wanted[:3]), [wanted[3].episode_id]]
    assert prefetched.hits == 3
    prefetched.expect(wanted)  # the batch is claimed and not trained: it is said again
    await ahead(prefetched)
    assert len(counting.calls) == 4
    prefetched.close()


async def test_no_more_is_read_ahead_than_there_is_room_for(episodes):
    wanted, counting = episodes
    prefetched = Prefetched(counting, wanted[0].payload.size + wanted[1].payload.size)
    prefetched.expect(wanted)
    await ahead(prefetched)
    assert len(counting.calls) == 2
    prefetched.expect(wanted[2:])  # a wrong prediction makes room
    await ahead(prefetched)
    assert counting.calls[2] == [wanted[2].episode_id]
    prefetched.close()


async def test_what_is_on_its_way_is_waited_for_and_what_is_not_is_read_with_the_others(episodes):
    wanted, counting = episodes
    counting.leave.clear()
    prefetched = Prefetched(counting, 1 << 20)
    prefetched.expect(wanted)
    await asyncio.to_thread(counting.begun.wait, 20)
    reading = asyncio.ensure_future(asyncio.to_thread(prefetched.read, wanted))
    while prefetched._held:
        await asyncio.wait([reading], timeout=0.001)
    counting.leave.set()
    assert same(await reading, counting._payloads.read(wanted))
    assert counting.calls == [[wanted[0].episode_id], [e.episode_id for e in wanted[1:]]]
    prefetched.close()


async def test_what_could_not_be_read_ahead_is_tried_again_when_it_is_needed(episodes):
    wanted, counting = episodes
    counting.lacking = {wanted[0].episode_id}
    prefetched = Prefetched(counting, 1 << 20)
    prefetched.expect(wanted[:1])
    await ahead(prefetched)
    counting.lacking = set()
    assert same(prefetched.read(wanted[:1]), counting._payloads.read(wanted[:1]))
    prefetched.close()


@pytest.mark.parametrize(("size", "ready", "count"), [(1, False, 4), (2, True, 2), (2, False, 0)])
async def test_a_rank_reads_its_share_ahead_of_what_is_whole(
    episodes, make_run, size, ready, count
):
    run = make_run(1, "other", rewards=((0.0, 1.0), (0.0, 1.0, 0.5, 0.25)))
    _, counting = episodes
    claim = Claim(run.experience.batches[0])
    prefetching = Prefetching(
        Prefetched(counting, 1 << 20), None, rank=1 if size > 1 else 0, size=size, advantage=Grpo()
    )
    mine = list(prefetching._mine(ComingStep(claim, ready)))
    stored = [episode for episode in mine if episode.inline is None]
    assert len(stored) == count
    prefetching.prefetched.close()


async def test_work_goes_on_while_nothing_can_be_foretold(episodes):
    _, counting = episodes
    asked = asyncio.Event()

    async def preview():
        asked.set()
        raise PayloadMissingError("any error of a peer", field="")

    prefetching = Prefetching(Prefetched(counting, 1), preview, 0, 1, Grpo())
    await prefetching.beside(asked.wait)
    silent = replace(prefetching, prefetched=Prefetched(counting, 0))
    asked.clear()
    await silent.beside(lambda: asyncio.sleep(0))
    assert not asked.is_set()
