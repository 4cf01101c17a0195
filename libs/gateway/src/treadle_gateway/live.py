"""One generation under way, and those who listen to it."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_gateway.capture.turns import Turn
from treadle_gateway.conversation import Event, Message, Reply
from treadle_gateway.errors import RETRY_S, RefusedError
from treadle_gateway.ports import Asked, Policy
from treadle_gateway.questions import Reading
from treadle_gateway.records import PolicyError

log = logging.getLogger(__name__)

READ_AT_ONCE = 256
"""Tokens that are read in a few milliseconds."""


@dataclass(slots=True, eq=False)
class Live:
    """Samples one turn. Those who join read `events` from the first, then `reply` or `failure`."""

    turn: Turn
    reading: Reading
    policy: Policy
    asked: Asked
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
    _rest: asyncio.Handle | None = field(default=None, init=False)
    """Set while it is to be gone on with."""
    _whole: bool = field(default=False, init=False)
    """The policy has said all."""
    _length: bool = field(default=False, init=False)
    _left: bool = field(default=False, init=False)
    """It was cancelled."""
    _stop: Callable[[], None] = field(init=False)

    def start(self) -> None:
        """Begins to sample."""
        self._stop = self.policy.begin(self.asked, self)

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
        if not self.over:
            self._left = True
            self._fail(cause, RefusedError("ended", cause), said=self._said())

    def heard(self, piece: Generated) -> None:
        """As Listener.heard."""
        if self.over:
            self._late(piece)
            return
        self.turn.heard(piece)
        self.on_sampled(piece.token_ids.size)
        self._length = piece.length
        self._unread += piece.token_ids.tolist()
        if self.stops or len(self._unread) >= READ_AT_ONCE or any(self._listeners.values()):
            self._go_on()

    def ended(self, error: TreadleError | None) -> None:
        """As Listener.ended."""
        if self.over:
            return
        if error is not None:
            self._fail(f"policy: {error.message}", refused_of(error), said=self._said())
            return
        self._whole = True
        self._go_on()

    def _late(self, piece: Generated) -> None:
        """Was sampled before the policy knew that nobody listens."""
        if self._left:
            self.turn.late(piece)
            self.on_sampled(piece.token_ids.size)

    def _go_on(self) -> None:
        """Reads some of what came; where much did, others have their turn before the rest is."""
        if self._rest is not None or self.over:
            return
        try:
            self._read(READ_AT_ONCE)
            if self._unread and not self.reading.stopped:
                self._rest = asyncio.get_running_loop().call_soon(self._read_rest)
            elif self._whole or self.reading.stopped:
                self._finish()
        except InvalidFieldError as error:  # not what the client sent: what the policy made of it
            failure = RefusedError("unavailable", f"policy: {error.message}", retry_after_s=RETRY_S)
            self._fail(f"policy: {error.message}", failure)
        except Exception as error:
            log.exception("a reply could not be made")
            name = type(error).__name__
            failure = RefusedError("internal", f"a reply could not be made: {name}")
            self._fail(f"a fault: {name}", failure)

    def _read_rest(self) -> None:
        self._rest = None
        self._go_on()

    def _finish(self) -> None:
        """Everything is read: makes the reply."""
        if not self.turn.tokens > self.turn.prompt_tokens:
            error = PolicyError(Kind.UNAVAILABLE, "the policy sampled nothing", "", None)
            self._fail(f"policy: {error.message}", refused_of(error))
            return
        stop = self.reading.stopped
        events, message, finish = self.reading.finish(length=self._length and not stop)
        self.events += events
        self.reply = self.turn.finish(
            message,
            finish,
            id=self.id,
            created=self.created,
            reasoning_tokens=self.reading.reasoning_tokens,
            stop=stop,
        )
        self._end()
        self._tell()

    def _read(self, most: int) -> None:
        ids, self._unread = self._unread[:most], self._unread[most:]
        if ids:
            self.events += self.reading.feed(ids)
            self._tell()

    def _said(self) -> Message | None:
        """What was said so far, as far as it can be read: clients keep it, and go on from it."""
        try:
            self._read(len(self._unread))
            return self.reading.finish(length=True)[1] if self.events else None
        except Exception:
            log.exception("what was said cannot be read")
            return None

    def _fail(self, cause: str, failure: RefusedError, *, said: Message | None = None) -> None:
        self._end()
        self.failure = failure
        self.turn.cut(cause, said)
        self.on_failed(self)
        self._tell()

    def _end(self) -> None:
        """Wants to hear no more."""
        self._stop()
        if self._rest is not None:
            self._rest.cancel()

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
