"""Keeps one run: decides in memory, stores through the ledger, answers what is durable.

One event loop decides; one thread appends. Whatever was decided while an append was on its way
goes into the next one (group commit). Every answer, refusals and reads included, waits until the
position of the journal that it saw is durable.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

from treadle_core.errors import Kind, TreadleError
from treadle_experience.core import tickets
from treadle_experience.core.errors import LedgerFailedError, WriterFencedError
from treadle_experience.core.leases import Leases
from treadle_experience.core.run import Run
from treadle_experience.core.tickets import Attempt
from treadle_experience.core.transitions import Transition
from treadle_experience.ports import Ledger

log = logging.getLogger(__name__)

APPEND_LIMIT_S = 30.0
"""An append that takes longer has failed: nobody can tell a full queue from a dead disk."""

A = TypeVar("A")
Clock = Callable[[], float]
"""Monotonic seconds."""


class Keeper:
    """The only writer of one run. `write` and `sweep` have to run beside the calls."""

    def __init__(
        self,
        run: Run,
        ledger: Ledger,
        *,
        on_durable: Callable[[Transition], None] = lambda transition: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Takes the ledger over and loads it; blocks.

        `on_durable` is called with every transition of this process once it is stored.

        Raises WrongRunError, LedgerFormatError, or InvalidFieldError for a rule that changed.
        """
        self._run = run
        self._ledger = ledger
        self._on_durable = on_durable
        self._clock = clock
        self._epoch = ledger.acquire(run.rules.run_id)
        run.load(ledger.load())
        self._leases = Leases(run.rules.lease_s, run.rules.deadline_s)
        self._leases.start(run.state, clock())
        self._queue = run.take()
        self._durable = run.state.position - len(self._queue)
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._work = asyncio.Event()
        self._bell = asyncio.Event()
        self._failure: BaseException | None = None
        self._draining = False
        self._thread = ThreadPoolExecutor(1, "ledger")
        if self._queue:
            self._work.set()

    @property
    def position(self) -> int:
        """Position of the journal up to which everything is durable."""
        return self._durable

    async def ask(self, decide: Callable[[Run], A]) -> A:
        """Decides, and answers once that is durable. Raises what `decide` raises, then too."""
        if self._failure is not None:
            await self._never()
        try:
            answer = decide(self._run)
        except TreadleError as error:
            if error.kind is Kind.BROKEN:
                self._fail(error)
            else:
                await self._settle()
            raise
        except Exception as error:
            self._fail(error)
            raise
        await self._settle()
        return answer

    async def poll(
        self, decide: Callable[[Run], A], enough: Callable[[A], bool], *, wait_s: float
    ) -> A:
        """Asks again at each change until the answer is `enough` or `wait_s` seconds are over."""
        until = self._clock() + wait_s
        while True:
            bell = self._bell
            answer = await self.ask(decide)
            left_s = until - self._clock()
            if enough(answer) or left_s <= 0 or self._draining:
                return answer
            try:
                async with asyncio.timeout(left_s):
                    await bell.wait()
            except TimeoutError:
                return answer

    def renew(self, attempts: Iterable[Attempt]) -> None:
        """Extends the leases of attempts that are still held."""
        now = self._clock()
        for attempt in attempts:
            self._leases.renew(attempt.episode_id, attempt.attempt, now)

    async def write(self) -> None:
        """Stores what was decided, forever. Raises what made an append or a decision fail."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self._failure is not None:
                raise self._failure
            batch, self._queue = self._queue, []
            if batch:
                await self._append(batch)

    async def sweep(self) -> None:
        """Ends leases and deadlines that ran out, forever."""
        interval_s = min(1.0, self._run.rules.lease_s / 4)
        swept = self._clock()
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            late_s = now - swept - interval_s
            swept = now
            if late_s > interval_s:
                self._leases.forgive(late_s)
            ended = [Attempt(*lease) for lease in self._leases.due(self._run.state, now)]
            if ended:
                log.info("%d leases ran out", len(ended))
                await self.ask(lambda run, ended=ended: tickets.expire(run, ended))

    async def drain(self) -> None:
        """Ends all waiting and stores what was decided."""
        self._draining = True
        self._ring()
        await self._settle()

    def close(self) -> None:
        """Waits for an append on its way, and lets the ledger go; blocks."""
        self._thread.shutdown(wait=True)
        self._ledger.close()

    async def _settle(self) -> None:
        recorded = self._run.take()
        if recorded:
            self._leases.follow(recorded, self._clock())
            self._queue += recorded
            self._work.set()
        position = self._run.state.position
        if position > self._durable:
            future = asyncio.get_running_loop().create_future()
            self._waiters.append((position, future))
            await future

    async def _append(self, batch: list[Transition]) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(APPEND_LIMIT_S):
                await loop.run_in_executor(self._thread, self._ledger.append, batch, self._epoch)
        except Exception as error:
            failure = error if isinstance(error, TreadleError) else LedgerFailedError(repr(error))
            self._fail(failure)
            raise failure from error
        self._durable += len(batch)
        while self._waiters and self._waiters[0][0] <= self._durable:
            future = self._waiters.popleft()[1]
            if not future.done():
                future.set_result(None)
        for transition in batch:
            self._on_durable(transition)
        self._ring()

    def _ring(self) -> None:
        self._bell.set()
        self._bell = asyncio.Event()

    def _fail(self, error: BaseException) -> None:
        """Nothing is acknowledged from here on; `write` raises and the process ends."""
        self._failure = self._failure or error
        self._work.set()
        if isinstance(error, WriterFencedError):
            for _, future in self._waiters:
                if not future.done():
                    future.set_exception(error)

    async def _never(self) -> NoReturn:
        """Leaves a call unanswered until the server ends it, so that its peer asks our successor.

        Raises WriterFencedError where there is a successor that the peer should know of.
        """
        if isinstance(self._failure, WriterFencedError):
            raise self._failure
        await asyncio.get_running_loop().create_future()
        raise AssertionError
