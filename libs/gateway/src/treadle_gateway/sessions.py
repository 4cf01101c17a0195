"""The open sessions of a worker: what was said in each, its bounds, and its end."""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakValueDictionary

from treadle_agents.images.picture import Picture
from treadle_core.episodes import Segment
from treadle_gateway.access import Register, ended
from treadle_gateway.capture.labels import LABELS
from treadle_gateway.capture.session import Capture
from treadle_gateway.capture.turns import Turn
from treadle_gateway.errors import RETRY_S, RefusedError
from treadle_gateway.live import Live
from treadle_gateway.media import Media
from treadle_gateway.questions import TokenLines
from treadle_gateway.terms import Outcome, SessionSpec


@dataclass(slots=True, eq=False)
class Session:
    """One session. `lock` is held from finding a request's place until its turn has begun."""

    id: str
    spec: SessionSpec
    capture: Capture
    media: Media
    tokens: TokenLines = field(default_factory=TokenLines, init=False)
    """What was asked in tokens."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    counts: Counter[str] = field(default_factory=Counter[str], init=False)
    outcome: Outcome | None = field(default=None, init=False)
    over: bool = field(default=False, init=False)
    sampled: int = field(default=0, init=False)
    asked: Turn | None = field(default=None, init=False)
    """Whose prompt went to the policy last."""
    timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _running: int = field(default=0, init=False)
    _lives: dict[int, Live] = field(default_factory=dict[int, Live], init=False)

    @contextmanager
    def request(self) -> Generator[None]:
        """Counts a request while it runs. Raises RefusedError at a bound of the session."""
        self.check()
        self.counts["http_requests"] += 1
        if self.counts["http_requests"] > self.spec.max_requests:
            raise _spent("max_requests", self.spec.max_requests)
        if self._running >= self.spec.max_concurrent:
            limit = self.spec.max_concurrent
            message = f"max_concurrent: {limit} requests of this session run already"
            raise RefusedError("busy", message, code="max_concurrent", retry_after_s=RETRY_S)
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    def check(self) -> None:
        """Raises RefusedError where the session is over."""
        if self.over:
            raise ended()

    @property
    def room(self) -> int:
        """Tokens that the session may still sample. Raises RefusedError where there are none."""
        room = self.spec.max_sampled - self.sampled
        if room < 1:
            raise _spent("max_sampled", self.spec.max_sampled)
        return room

    def add_sampled(self, tokens: int) -> None:
        """Counts what the policy sampled."""
        self.sampled += tokens

    def keep(self, live: Live) -> None:
        """Remembers a generation until its reply is delivered, for whoever asks again."""
        self._lives[id(live.turn)] = live

    def live_of(self, turn: Turn) -> Live:
        """The generation of a turn that is not delivered."""
        return self._lives[id(turn)]

    def forget(self, live: Live) -> None:
        """Its reply is delivered, or it failed: nobody can join it any more."""
        self._lives.pop(id(live.turn), None)

    def stop(self, cause: str) -> None:
        """Lets nothing run any more; what was generated in part is kept, untrained."""
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        for live in list(self._lives.values()):
            live.cancel(cause)


def _spent(name: str, limit: int) -> RefusedError:
    # Not 429: a client that asked again would ask for ever.
    message = f"{name}: this session is over its limit of {limit}"
    return RefusedError("invalid", message, code=name, limit=limit)


UNTAKEN = Outcome(no_reward="its client left before it began", expired=True)


@dataclass(slots=True)
class Sessions:
    """All sessions of a worker."""

    tell: Callable[[str, Outcome], None]
    """Told how a client ended its session, or that its time was over."""
    show: Callable[[str, Picture], None]
    """Told of every image of a session, once."""
    trained: frozenset[str] = frozenset(LABELS)
    """Labels whose turns are trained."""
    register: Register = field(default_factory=Register)
    _open: dict[str, Session] = field(default_factory=dict[str, Session], init=False)
    _pictures: "WeakValueDictionary[str, Picture]" = field(
        default_factory=WeakValueDictionary[str, Picture], init=False
    )

    def open(self, name: str, digest: bytes, spec: SessionSpec) -> None:
        """Opens a session for the holder of the token with this sha256."""
        media = Media(
            spec.max_images, spec.max_image_bytes, self._pictures, partial(self.show, name)
        )
        session = Session(
            name, spec, Capture(max_requests=spec.max_requests, trained=self.trained), media
        )
        loop = asyncio.get_running_loop()
        session.timer = loop.call_later(spec.deadline_s, self._expire, session)
        self._open[name] = session
        self.register.open(name, digest)

    def of(self, tokens: tuple[str, ...], named: str) -> Session:
        """The session that a client may talk in. Raises RefusedError."""
        return self._open[self.register.session(tokens, named)]

    def ended_by_client(self, session: Session, outcome: Outcome) -> None:
        """The client ends its session; its token is good for nothing more. Raises RefusedError."""
        session.check()
        self._finish(session, outcome, "the session ended")

    def untaken(self, name: str) -> None:
        """The client that a session was for had left before it learnt of it."""
        session = self._open.get(name)
        if session is not None and not session.over:
            self._finish(session, UNTAKEN, "its client left")

    async def end(self, name: str) -> tuple[tuple[Segment, ...], dict[str, float], Outcome | None]:
        """Ends a session and gives up what it came to: segments, counts, outcome."""
        self.register.revoke(name)
        session = self._open.pop(name)
        session.stop("the session ended")
        trainable = session.spec.trainable
        segments = await asyncio.to_thread(session.capture.segments, trainable=trainable)
        counts = {**session.capture.counts, **session.counts}
        session.capture.forget()
        return segments, {name: float(count) for name, count in counts.items()}, session.outcome

    def _expire(self, session: Session) -> None:
        self._finish(session, Outcome(expired=True), "the session's time was over")

    def _finish(self, session: Session, outcome: Outcome, cause: str) -> None:
        self.register.revoke(session.id)
        session.outcome = outcome
        session.stop(cause)
        self.tell(session.id, outcome)
