"""Gives a client the reply to its request, whole or as it comes."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from treadle_core.tickets import Json
from treadle_gateway.conversation import Reply
from treadle_gateway.delivery import Answer
from treadle_gateway.live import Live
from treadle_gateway.sessions import Session
from treadle_gateway.wires.wire import Stream


@dataclass(slots=True)
class Replies:
    """Answers one request. The reply is an action once the socket has all of it."""

    session: Session
    answer: Answer
    ping_s: float

    async def whole(
        self, live: Live, say: Callable[[Reply], Mapping[str, Json]]
    ) -> web.StreamResponse:
        """Answers when all is said.

        Raises RefusedError where there is no reply, ConnectionError where the client left.
        """
        news = live.join(piecewise=False)
        try:
            while live.reply is None:
                if live.failure is not None:
                    raise live.failure
                await news.wait()
                news.clear()
            response = await self.answer.whole(200, {}, say(live.reply))
            self._delivered(live)
        finally:
            live.leave(news)
        return response

    async def stream(self, live: Live, stream: Stream) -> web.StreamResponse:
        """Answers as it is said.

        Raises RefusedError where nothing was said yet, ConnectionError where the client left.
        """
        news = live.join(piecewise=True)
        try:
            return await self._stream(live, stream, news)
        finally:
            live.leave(news)

    async def _stream(self, live: Live, stream: Stream, news: asyncio.Event) -> web.StreamResponse:
        said, waiting = 0, [stream.start()]
        with _Silence(news, self.ping_s) as silence:
            while True:
                events = live.events[said:]
                said += len(events)
                waiting += map(stream.event, events)
                if live.reply is not None and said == len(live.events):
                    response = await self.answer.end(b"".join([*waiting, stream.end(live.reply)]))
                    self._delivered(live)
                    return response
                if live.failure is not None:
                    if not self.answer.begun:
                        raise live.failure
                    return await self.answer.cut(b"".join([*waiting, stream.failed(live.failure)]))
                if not events and not silence.over:
                    await news.wait()
                    news.clear()
                    continue
                if not events:
                    waiting.append(stream.ping())
                await self.answer.write(b"".join(waiting))
                waiting.clear()
                silence.broken()

    def _delivered(self, live: Live) -> None:
        live.hand_over()
        self.session.forget(live)


class _Silence:
    """Sets an event when nothing was written for some time; one timer for any number of writes."""

    def __init__(self, news: asyncio.Event, most_s: float) -> None:
        self._news = news
        self._most_s = most_s
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> "_Silence":
        self.broken()
        self._timer = self._loop.call_at(self._end, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @property
    def over(self) -> bool:
        """It has lasted too long."""
        return self._loop.time() >= self._end

    def broken(self) -> None:
        """Something was written."""
        self._end = self._loop.time() + self._most_s

    def _look(self) -> None:
        end = self._end
        if self.over:
            self._news.set()
            end = self._loop.time() + self._most_s
        self._timer = self._loop.call_at(end, self._look)
