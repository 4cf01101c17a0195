"""An event loop whose time is a number: nothing waits, and what happened can be replayed."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what is due; work for a thread happens on the loop, `thread_s()` seconds later."""

    def __init__(self, thread_s: Callable[[], float]) -> None:
        self._now = 0.0
        self._horizon = 0.0
        self._thread_s = thread_s
        super().__init__(_NoFiles(self))

    def time(self) -> float:
        return self._now

    def run_for(self, seconds: float) -> None:
        """Runs all that happens in the next `seconds`, until nothing is left to do at their end."""
        self._horizon = self._now + seconds
        self.run_forever()

    def run_in_executor(self, executor: object, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        self.call_later(self._thread_s(), _work, future, func, args)
        return future

    def pass_time(self, timeout: float | None) -> None:
        """Nothing is ready: the clock moves to the next timer, or the loop stops."""
        if timeout is None or self._now + timeout > self._horizon:
            self._now = self._horizon
            self.stop()
        else:
            self._now += timeout


def _work(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        value = func(*args)
    except Exception as error:  # noqa: BLE001 - travels to whoever awaits it
        if not future.done():
            future.set_exception(error)
    else:
        if not future.done():
            future.set_result(value)


class _NoFiles(selectors.BaseSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None or timeout > 0:
            self._loop.pass_time(timeout)
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def get_key(self, fileobj: Any) -> selectors.SelectorKey:
        raise KeyError(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return {}
