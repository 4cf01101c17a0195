"""Keeps one run: decides in memory, stores through the ledger, answers what is durable.

One event loop decides; one thread appends. Whatever was decided while an append was on its way
goes into the next one (group commit). Every answer, refusals and reads included, waits until the
position of the journal that it saw is durable.

A ledger without room stops time: nothing is decided and nothing is answered but LEDGER_FULL, leases
and deadlines stand still, and what was decided is kept and tried again until there is room.
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

from treadle_core.errors import Kind, TreadleError
from treadle_experience.core import condensation, tickets
from treadle_experience.core.errors import LedgerFailedError, LedgerFullError, WriterFencedError
from treadle_experience.core.leases import Leases
from treadle_experience.core.run import Run
from treadle_experience.core.state import Attempt
from treadle_experience.core.transitions import Transition
from treadle_experience.ports import Durability, Ledger
from treadle_runtime.failpoints import failpoint

log = logging.getLogger(__name__)

APPEND_LIMIT_S = 30.0
"""An append that takes longer has failed: nobody can tell a full queue from a dead disk."""

FULL_RETRY_S = 1.0
"""How often a full ledger is tried again, and after how long its callers are told to."""

WORTH = 2
"""How many times as long as its state a journal is when it is condensed."""

A = TypeVar("A")
P = ParamSpec("P")
Clock = Callable[[], float]
"""Monotonic seconds."""


@contextlib.contextmanager
def _uncollected() -> Generator[None]:
    """No garbage is looked for: what is loaded stays, and to look at it again and again is slow."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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

        Raises WrongRunError, LedgerFormatError, LedgerFullError, or InvalidFieldError for a rule
        that changed.
        """
        self._run = run
        self._ledger = ledger
        self._on_durable = on_durable
        self._clock = clock
        self._epoch = ledger.acquire(run.rules.run_id)
        failpoint("experience.start.after_acquire")
        # The whole of it before any, so that a ledger that cannot be read leaves the run as it is.
        with _uncollected():
            self._length = run.load(list(ledger.load()))
        self._leases = Leases(run.rules.lease_s, run.rules.deadline_s)
        self._leases.start(run.state, clock())
        self._queue = run.take()
        self._durable = run.state.position - len(self._queue)
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._work = asyncio.Event()
        self._bell = asyncio.Event()
        self._failure: BaseException | None = None
        self._full: LedgerFullError | None = None
        self._full_since = 0.0
        self._began = clock()
        self._append_s = 0.0
        self._draining = False
        self._thread = ThreadPoolExecutor(1, "ledger")
        if self._queue:
            self._work.set()

    @property
    def position(self) -> int:
        """Position of the journal up to which everything is durable."""
        return self._durable

    @property
    def durability(self) -> Durability:
        """What survives of what is acknowledged."""
        return self._ledger.durability

    @property
    def writer_epoch(self) -> int:
        """Of this process; those of its successors are higher."""
        return self._epoch

    @property
    def is_able(self) -> bool:
        """Whether decisions are taken: False while the ledger is full, or has failed."""
        return self._full is None and self._failure is None

    def row(self) -> dict[str, float | str]:
        """Seconds since the start, how many of them writes took, what survives, and how much.

        `journal`: transitions that a successor would load.
        """
        up_s = self._clock() - self._began
        return {
            "append_s": round(self._append_s, 3),
            "up_s": round(up_s, 3),
            "durability": self.durability.value,
            "journal": self._length,
        }

    async def ask(
        self, decide: Callable[Concatenate[Run, P], A], *args: P.args, **kwargs: P.kwargs
    ) -> A:
        """Decides, and answers once that is durable. Raises what `decide` raises, then too.

        Raises LedgerFullError where there is no room for an answer; what was decided before that
        showed becomes durable later, so a repeat finds it done.
        """
        if self._failure is not None:
            await self._never()
        if self._full is not None:
            raise _refusal(self._full)
        try:
            answer = decide(self._run, *args, **kwargs)
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
            self._leases.renew(attempt, now)

    async def verify(self) -> None:
        """Returns if no other process had taken the ledger over when this was called.

        Raises WriterFencedError otherwise, and the process ends.
        """
        await self._in_thread(lambda none: self._ledger.append(none, self._epoch), [])

    async def write(self) -> None:
        """Stores what was decided, forever. Raises what made an append or a decision fail."""
        while True:
            await self._work.wait()
            self._work.clear()
            if self._failure is not None:
                raise self._failure
            batch, self._queue = self._queue, []
            if batch:
                # Whatever was decided is in the batch, so that this is the state after it.
                head = self._head(len(batch))
                if await self._append(batch) and head:
                    await self._condense(head)

    async def sweep(self) -> None:
        """Ends leases and deadlines that ran out, forever."""
        interval_s = min(1.0, self._run.rules.lease_s / 4)
        swept = self._clock()
        while True:
            await asyncio.sleep(interval_s)
            now = self._clock()
            late_s = now - swept - interval_s
            swept = now
            if self._full is not None:
                continue
            if late_s > interval_s:
                self._leases.forgive(late_s)
            ended = self._leases.due(self._run.state, now)
            if ended:
                log.info("%d leases ran out", len(ended))
                with contextlib.suppress(LedgerFullError):  # it is decided, and stored later
                    await self.ask(tickets.expire, ended)

    async def drain(self) -> None:
        """Ends all waiting and stores what was decided, unless there is no room for it."""
        self._draining = True
        self._ring()
        try:
            await self._settle()
        except LedgerFullError as error:
            log.warning("what nobody was told is not stored: %s", error.message)

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
            if self._full is not None:
                raise _refusal(self._full)
            future = asyncio.get_running_loop().create_future()
            self._waiters.append((position, future))
            await future

    async def _append(self, batch: list[Transition]) -> bool:
        """Stores what was decided and answers who waits for it; False where there is no room."""
        try:
            await self._in_thread(self._store, batch)
        except LedgerFullError as error:
            self._queue = [*batch, *self._queue]
            self._stop_time(error)
            return False
        failpoint("experience.append.before_reply")
        self._durable += len(batch)
        self._length += len(batch)
        self._go_on()
        while self._waiters and self._waiters[0][0] <= self._durable:
            future = self._waiters.popleft()[1]
            if not future.done():
                future.set_result(None)
        for transition in batch:
            self._on_durable(transition)
        self._ring()
        return True

    def _head(self, num_more: int) -> list[Transition] | None:
        """What the journal can be condensed to once `num_more` are appended, where it is worth it.

        It is worth it once the journal is so long that a transition costs a constant in the mean.
        """
        state = self._run.state
        worth = max(self._run.rules.condense_after, WORTH * condensation.size(state))
        return condensation.condense(state) if self._length + num_more >= worth else None

    async def _condense(self, head: list[Transition]) -> None:
        """Shortens the journal that is stored; where there is no room for it, later."""
        try:
            await self._in_thread(self._replace, head)
        except LedgerFullError as error:
            log.warning("the journal is not condensed: %s", error.message)
            self._length -= self._run.rules.condense_after
            return
        self._length = len(head)
        log.info("the journal is condensed to %d transitions", len(head))

    async def _in_thread(
        self, write: Callable[[list[Transition]], None], what: list[Transition]
    ) -> None:
        """Writes to the ledger. A failure ends the process, unless there is only no room."""
        began = self._clock()
        try:
            async with asyncio.timeout(APPEND_LIMIT_S):
                await asyncio.get_running_loop().run_in_executor(self._thread, write, what)
        except LedgerFullError:
            raise
        except Exception as error:
            failure = error if isinstance(error, TreadleError) else LedgerFailedError(repr(error))
            self._fail(failure)
            raise failure from error
        finally:
            self._append_s += self._clock() - began

    def _stop_time(self, error: LedgerFullError) -> None:
        """Refuses all who wait, and tries the append again later."""
        if self._full is None:
            log.error("nothing is acknowledged until there is room: %s", error.message)
            self._full_since = self._clock()
        self._full = error
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(_refusal(error))
        self._waiters.clear()
        self._ring()
        asyncio.get_running_loop().call_later(FULL_RETRY_S, self._work.set)

    def _go_on(self) -> None:
        """There is room: leases and deadlines go on from where they stood."""
        if self._full is None:
            return
        seconds = self._clock() - self._full_since
        self._full = None
        self._leases.forgive(seconds)
        log.info("there is room again, after %.1f s", seconds)

    def _store(self, batch: list[Transition]) -> None:
        """Appends, in the ledger's thread."""
        failpoint("experience.append.before_flush")
        self._ledger.append(batch, self._epoch)
        failpoint("experience.append.after_flush")

    def _replace(self, head: list[Transition]) -> None:
        """Condenses, in the ledger's thread."""
        failpoint("experience.condense.before_flush")
        self._ledger.condense(head, self._durable, self._epoch)
        failpoint("experience.condense.after_flush")

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


def _refusal(error: LedgerFullError) -> LedgerFullError:
    """One for each call that it ends."""
    return LedgerFullError(
        error.message,
        field=error.field,
        limit=error.limit,
        value=error.value,
        retry_after_s=FULL_RETRY_S,
    )
