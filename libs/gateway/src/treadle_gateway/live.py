"""One generation under way, and those who listen to it."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_gateway.capture.turns import Turn
from treadle_gateway.conversation import Event, Message, Reply
from treadle_gateway.errors import RETRY_S, RefusedError
from treadle_gateway.ports import Policy, Prompt
from treadle_gateway.questions import Reading
from treadle_gateway.records import PolicyError

log = logging.getLogger(__name__)

READ_AT_ONCE = 256
"""Tokens that are read in a few milliseconds."""


@dataclass(slots=True, eq=False)
class Live:
    """Samples one turn. Listeners read `events` from the first, then `reply` or `failure`."""

    turn: Turn
    reading: Reading
    policy: Policy
    prompt: Prompt
    created: int
    """Seconds since 1970."""
    stops: bool
    """A text may end it, so that every piece is to be read at once."""
    on_sampled: Callable[[int], None]
    """Told of every piece how many tokens it has."""
    on_failed: "Callable[[Live], None]"
    """Told when there will be no reply."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    events: list[Event] = field(default_factory=list[Event], init=False)
    reply: Reply | None = field(default=None, init=False)
    failure: RefusedError | None = field(default=None, init=False)
    delivered: bool = field(default=False, init=False)
    _listeners: dict[asyncio.Event, bool] = field(
        default_factory=dict[asyncio.Event, bool], init=False
    )
    """Those who wait, and whether for each piece."""
    _unread: list[int] = field(default_factory=list[int], init=False)
    """Tokens of which no events are made yet: while nobody waits for these, many at once."""
    _task: "asyncio.Task[None] | None" = field(default=None, init=False)

    def start(self) -> None:
        """Begins to sample."""
        self._task = asyncio.create_task(self._run())

    @property
    def over(self) -> bool:
        """Nothing more comes."""
        return self.reply is not None or self.failure is not None

    def join(self, *, piecewise: bool) -> asyncio.Event:
        """Listens: the event is set when it is over, and `piecewise` whenever there is news."""
        news = asyncio.Event()
        self._listeners[news] = piecewise
        if piecewise:
            self._read(len(self._unread))
        return news

    def leave(self, news: asyncio.Event) -> None:
        """Listens no more; a generation that nobody listens to is cancelled."""
        self._listeners.pop(news, None)
        if not self._listeners and not self.over:
            self.cancel("the client went away")

    def hand_over(self) -> None:
        """The last byte was taken by a socket: the reply is an action now."""
        if not self.delivered:
            self.delivered = True
            self.turn.delivered()

    def cancel(self, cause: str) -> None:
        """Ends the sampling; the turn is kept, untrained. What is over stays as it is."""
        if self._task is not None and not self.over:
            # Now, not when the task has ended: who asks again meanwhile must not join it.
            self._fail(cause, RefusedError("ended", cause), said=self._said())
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self.reply = await self._sample()
        except InvalidFieldError as error:  # not what the client sent: what the policy made of it
            failure = RefusedError("unavailable", f"policy: {error.message}", retry_after_s=RETRY_S)
            self._fail(f"policy: {error.message}", failure)
        except TreadleError as error:
            self._fail(f"policy: {error.message}", refused_of(error), said=self._said())
        except asyncio.CancelledError:
            self.cancel("the worker ends")
        except Exception as error:
            log.exception("a reply could not be made")
            name = type(error).__name__
            failure = RefusedError("internal", f"a reply could not be made: {name}")
            self._fail(f"a fault: {name}", failure)
        else:
            self._tell()

    async def _sample(self) -> Reply:
        length, sampled = False, 0
        async with aclosing(self.policy.generate(self.prompt)) as pieces:
            async for piece in pieces:
                self.turn.heard(piece)
                sampled += piece.token_ids.size
                self.on_sampled(piece.token_ids.size)
                length = piece.length
                self._unread += piece.token_ids.tolist()
                if self.stops or len(self._unread) >= READ_AT_ONCE or any(self._listeners.values()):
                    await self._read_all()
                if self.reading.stopped:
                    break
        if not sampled:
            raise PolicyError(Kind.UNAVAILABLE, "the policy sampled nothing", "", None)
        await self._read_all()
        events, message, finish = self.reading.finish(length=length and not self.reading.stopped)
        self.events += events
        return self.turn.finish(
            message,
            finish,
            id=self.id,
            created=self.created,
            reasoning_tokens=self.reading.reasoning_tokens,
            stop=self.reading.stopped,
        )

    async def _read_all(self) -> None:
        """Makes events of tokens; where many came, others have their turn between some."""
        self._read(READ_AT_ONCE)
        while self._unread:
            await asyncio.sleep(0)
            self._read(READ_AT_ONCE)

    def _read(self, most: int) -> None:
        ids, self._unread = self._unread[:most], self._unread[most:]
        if ids:
            self.events += self.reading.feed(ids)
            self._tell()

    def _said(self) -> Message | None:
        """What was said so far: clients keep what they heard, and go on from it."""
        self._read(len(self._unread))
        return self.reading.finish(length=True)[1] if self.events else None

    def _fail(self, cause: str, failure: RefusedError, *, said: Message | None = None) -> None:
        self.failure = failure
        self.turn.cut(cause, said)
        self.on_failed(self)
        self._tell()

    def _tell(self) -> None:
        for news, piecewise in self._listeners.items():
            if piecewise or self.over:
                news.set()


def refused_of(error: TreadleError) -> RefusedError:
    """How a client is told what the policy cannot do."""
    retry_s = RETRY_S if error.retry_after_s is None else error.retry_after_s
    if error.kind is Kind.EXHAUSTED:
        return RefusedError("busy", error.message, retry_after_s=retry_s)
    if error.kind is Kind.INVALID:
        return RefusedError("invalid", error.message, field=error.field)
    return RefusedError("unavailable", error.message, retry_after_s=retry_s)
