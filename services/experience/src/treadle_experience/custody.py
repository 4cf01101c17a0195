"""What the payload store holds follows what the ledger needs.

It is confirmed before it is recorded, let go once its release is durable, and swept for what a
crash between the two left.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from treadle.episode.v1 import episode_pb2
from treadle_core.errors import PayloadMissingError, TreadleError
from treadle_experience import payloads
from treadle_experience.confirming import Confirmer
from treadle_experience.core.run import Run
from treadle_experience.core.state import Result
from treadle_experience.keeper import Keeper
from treadle_payloads.store import Hold, PayloadReference, PayloadStore, Stay
from treadle_runtime.failpoints import failpoint

log = logging.getLogger(__name__)

SWEEP_S = 60.0
"""Seconds between two looks for what nobody needs."""

_AT_ONCE = 4096
_THREADS = 16
"""Stores that are away may hold up so many calls."""

T = TypeVar("T")


class Custody:
    """Keeps what recorded results need, of one run. `release` and `sweep` have to run beside."""

    def __init__(
        self, keeper: Keeper, store: PayloadStore, released: "asyncio.Queue[Hold]", *, limit: int
    ) -> None:
        """`released` gives what durable releases let go; up to `limit` bytes stay in the ledger."""
        self.store = store
        self._keeper = keeper
        self._released = released
        self._limit = limit
        self._arriving: Counter[tuple[str, str]] = Counter()
        """What results need that are about to be recorded: sha256 and episode."""
        self._leaving: set[str] = set()
        """What is being forgotten now; who needs it has to put it again."""
        self._ending: set[tuple[str, str]] = set()
        """Holds that end now, sha256 and episode; likewise."""
        self._threads = ThreadPoolExecutor(_THREADS, "payloads")
        self._confirmer = Confirmer(self._confirm)

    @asynccontextmanager
    async def taken(
        self, payload: episode_pb2.Payload, result: Result, episode_id: str
    ) -> AsyncGenerator[tuple[Result, bytes | None]]:
        """Checks what a result needs and keeps it while it is recorded, and from then on.

        The result says where the payload is now; the bytes are there if they stay inline. An
        inline one of more than the limit is moved to the store.

        Raises InvalidFieldError, PayloadCorruptError, PayloadMissingError where the store does not
        hold that many bytes under a sha256, or what the store raises.
        """
        inline = payloads.checked_inline(payload, result) if result.inlined else None
        if inline is not None and len(inline) > self._limit:
            data, inline = inline, None
            moved = await self._in_thread(lambda: self.store.put(data, holder=episode_id))
            result = replace(result, inlined=False, node=moved.node, node_epoch=moved.epoch)
        async with self._kept(payloads.stored_references(result), episode_id):
            yield result, inline

    async def unneeded(self, keys: Collection[str]) -> list[str]:
        """Those that no result needs, by what is durable, and none that arrives."""
        return await self._keeper.ask(lambda run: self._unneeded(run, keys))

    async def release(self) -> None:
        """Lets go of what durable releases let go, forever."""
        while True:
            holds = [await self._released.get()]
            holds += [self._released.get_nowait() for _ in range(self._released.qsize())]
            await self._release(holds)

    async def finish(self) -> None:
        """Lets go of what is left to be let go."""
        holds = [self._released.get_nowait() for _ in range(self._released.qsize())]
        if holds:
            await self._release(holds)

    async def sweep(self) -> None:
        """Forgets what nobody needs, every SWEEP_S, forever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            swept = await self.sweep_once()
            if swept:
                log.info("%d payloads were left behind, and are gone now", swept)

    async def sweep_once(self) -> int:
        """How many payloads went that nobody needs."""
        stays, swept = iter(self.store.idle()), 0
        while page := await self._in_thread(lambda: list(islice(stays, _AT_ONCE))):
            swept += await self._drop({stay.sha256: stay for stay in page})
        return swept

    def close(self) -> None:
        """Waits for the calls on their way."""
        self._threads.shutdown(wait=True)

    @asynccontextmanager
    async def _kept(
        self, needs: Mapping[str, PayloadReference], episode_id: str
    ) -> AsyncGenerator[None]:
        """Confirms what a result needs, named by its fields, and counts it as arriving."""
        keys = [(reference.sha256, episode_id) for reference in needs.values()]
        for field, reference in needs.items():
            key = reference.sha256
            if key in self._leaving or (key, episode_id) in self._ending:
                raise _missing(field, reference)
        self._arriving.update(keys)
        try:
            confirm = self._confirmer.confirm
            holds = [Hold(reference, episode_id) for reference in needs.values()]
            are_there = await asyncio.gather(*map(confirm, holds))
            for (field, reference), is_there in zip(needs.items(), are_there, strict=True):
                if not is_there:
                    raise _missing(field, reference)
            yield
        finally:
            self._arriving.subtract(keys)
            self._arriving += Counter()  # drops the zeros

    async def _release(self, holds: list[Hold]) -> None:
        ended: list[Hold] = []
        try:
            ended = await self._keeper.ask(lambda run: self._end(run, holds))
            failpoint("experience.release.before_delete")
            epoch = self._keeper.writer_epoch
            await self._in_thread(lambda: self.store.release(ended, writer_epoch=epoch))
        except TreadleError as error:
            log.warning("%d payloads are left to the sweeper: %s", len(holds), error.message)
        # Not where this is cancelled: the thread goes on.
        self._leaving -= {hold.reference.sha256 for hold in ended if not hold.shared}
        self._ending -= set(map(_pair, ended))

    async def _drop(self, stays: dict[str, Stay]) -> int:
        going: set[str] = set()
        swept = 0
        try:
            going = await self._keeper.ask(lambda run: self._leave(run, stays))
            if going:
                await self._keeper.verify()  # its successor may need what a writer knows nothing of
                drop = self.store.drop
                swept = await self._in_thread(lambda: sum(drop(stays[key]) for key in going))
        except TreadleError as error:
            log.warning("payloads are swept later: %s", error.message)
        self._leaving -= going  # as in `_release`
        return swept

    async def _confirm(self, holds: list[Hold]) -> list[Hold]:
        epoch = self._keeper.writer_epoch
        return await self._in_thread(lambda: self.store.confirm(holds, writer_epoch=epoch))

    def _end(self, run: Run, holds: Iterable[Hold]) -> list[Hold]:
        """Those that end; what others need is shared, and stays."""
        going = self._leave(run, {hold.reference.sha256 for hold in holds})
        ended = [
            replace(hold, shared=hold.reference.sha256 not in going)
            for hold in holds
            if not self._is_needed(run, hold)
        ]
        self._ending.update(map(_pair, ended))
        return ended

    def _is_needed(self, run: Run, hold: Hold) -> bool:
        """Whether a later attempt at the episode needs the same bytes."""
        if _pair(hold) in self._arriving:
            return True
        episode = run.state.episodes.get(hold.holder)
        if episode is None or episode.result is None or episode.released:
            return False
        return hold.reference.sha256 in dict(episode.result.stored())

    def _leave(self, run: Run, keys: Collection[str]) -> set[str]:
        going = set(self._unneeded(run, keys))
        self._leaving |= going
        return going

    def _unneeded(self, run: Run, keys: Collection[str]) -> list[str]:
        needed, arriving = run.state.references, {sha256 for sha256, _ in self._arriving}
        return [key for key in keys if key not in needed and key not in arriving]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _pair(hold: Hold) -> tuple[str, str]:
    return hold.reference.sha256, hold.holder


def _missing(field: str, reference: PayloadReference) -> PayloadMissingError:
    return PayloadMissingError(
        f"{field}: {reference.sha256} of {reference.size} bytes is not in the store",
        field=field,
        limit=f"{reference.size} bytes in the store",
        value=reference.sha256,
    )
