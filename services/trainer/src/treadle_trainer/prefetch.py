"""Payloads of the steps to come, read while a step is computed.

What a prediction gets wrong costs bytes, and nothing else: what was not read ahead is read when it
is needed, and what was is checked as ever.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from treadle_core.errors import TreadleError
from treadle_trainer.core.advantages import Advantage
from treadle_trainer.core.claims import ClaimedEpisode, ComingStep
from treadle_trainer.core.shares import share_out
from treadle_trainer.ports import PayloadReader, Read
from treadle_trainer.waiting import cancel

log = logging.getLogger(__name__)

DEPTH = 2
"""Steps that are looked ahead, where the run's lag allows as many."""

LOOK_S = 0.5
"""How often the prediction is looked at, where payloads lie in a store."""
_IDLE_S = 5.0
"""How often, where the ledger holds them all."""


@dataclass(slots=True)
class _Held:
    size: int
    read: "Future[Read]"


@dataclass(slots=True)
class Prefetched:
    """PayloadReader that has read ahead what was expected, up to `max_bytes` of payloads."""

    payloads: PayloadReader
    max_bytes: int
    hits: int = 0
    """Episodes that were there, or on their way, when they were needed."""
    _held: dict[str, _Held] = field(default_factory=dict[str, _Held], init=False)
    _taken: set[str] = field(default_factory=set[str], init=False)
    """Those of what is expected that were needed already."""
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        """Reads ahead in one thread, which ends with the process or by `close`."""
        self._thread = ThreadPoolExecutor(1, "prefetch")

    def read(self, episodes: Sequence[ClaimedEpisode]) -> list[Read]:
        # What has not begun is read with the others, and what failed is tried again.
        begun = {key: read for key, read in self._take(episodes).items() if not read.cancel()}
        found: dict[str, Read] = {}
        for sha256, read in begun.items():
            if read.exception() is None and not isinstance(read.result(), TreadleError):
                found[sha256] = read.result()
        self.hits += len(found)
        missing = [each for each in episodes if each.payload.sha256 not in found]
        rest = iter(self.payloads.read(missing) if missing else [])
        return [found.get(each.payload.sha256) or next(rest) for each in episodes]

    def expect(self, episodes: Iterable[ClaimedEpisode]) -> None:
        """Reads ahead what lies in a store of `episodes`, first come; forgets all others."""
        wanted = {each.payload.sha256: each for each in episodes if each.inline is None}
        with self._lock:
            self._taken &= wanted.keys()
            for sha256 in self._held.keys() - wanted.keys():
                self._held.pop(sha256).read.cancel()
            room = self.max_bytes - sum(held.size for held in self._held.values())
            for sha256, episode in wanted.items():
                if sha256 in self._held or sha256 in self._taken:
                    continue
                room -= episode.payload.size
                if room < 0:
                    break
                read = self._thread.submit(self._read_ahead, episode)
                self._held[sha256] = _Held(episode.payload.size, read)

    def drain(self) -> None:
        """Waits until all that is expected was read, or could not be."""
        with self._lock:
            reads = [held.read for held in self._held.values()]
        wait(reads)

    def close(self) -> None:
        """Forgets what was read ahead, and reads no more."""
        self.expect(())
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _take(self, episodes: Sequence[ClaimedEpisode]) -> Mapping[str, "Future[Read]"]:
        """What was read ahead of them; it is held no longer."""
        with self._lock:
            keys = [each.payload.sha256 for each in episodes if each.inline is None]
            self._taken |= set(keys)
            return {key: self._held.pop(key).read for key in keys if key in self._held}

    def _read_ahead(self, episode: ClaimedEpisode) -> Read:
        return self.payloads.read([episode])[0]


@dataclass(frozen=True, slots=True)
class Prefetching:
    """Has a rank's payloads read ahead, while something else runs."""

    prefetched: Prefetched
    preview: Callable[[], Awaitable[Sequence[ComingStep]]]
    """Asks experience."""
    rank: int
    size: int
    advantage: Advantage

    async def beside(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Awaits `work`, reading ahead until it is done, where there is room for any."""
        if not self.prefetched.max_bytes:
            await work()
            return
        working = asyncio.ensure_future(work())
        reading = asyncio.ensure_future(self._run())
        try:
            await asyncio.wait({working, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                reading.result()
            await working
        finally:
            await cancel(working, reading)
            self.prefetched.close()

    async def _run(self) -> None:
        while True:
            try:
                mine = [each for step in await self.preview() for each in self._mine(step)]
            except TreadleError as error:  # whoever trains finds out, and says so
                log.debug("nothing is known of the steps to come: %s", error.message)
                mine = []
            self.prefetched.expect(mine)
            stored = any(each.inline is None for each in mine)
            await asyncio.sleep(LOOK_S if stored else _IDLE_S)

    def _mine(self, step: ComingStep) -> Iterable[ClaimedEpisode]:
        """This rank's share of a step; of one that is not whole, nobody knows it."""
        if self.size > 1 and not step.ready:
            return ()
        turns = share_out(step.claim, self.advantage, self.size)
        pairs = zip(step.claim.episodes, turns, strict=True)
        return [episode for episode, turn in pairs if turn == self.rank]
