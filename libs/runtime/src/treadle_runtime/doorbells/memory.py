"""Bells within one process."""

import asyncio
import contextlib
from collections.abc import Sequence

from treadle_runtime.doorbell import Doorbell, Topic


class MemoryDoorbell(Doorbell):
    """Rings for those who wait in this process: the near end of a bell, and a whole one for tests.

    Always live.
    """

    def __init__(self, *, run_id: str, hears: Sequence[Topic] = ()) -> None:
        """Takes what every doorbell takes."""
        del run_id
        self._rung = {topic: asyncio.Event() for topic in hears}

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def is_live(self) -> bool:
        return True

    def ring(self, topic: Topic) -> None:
        if topic in self._rung:
            self._rung[topic].set()

    async def wait(self, topic: Topic, timeout_s: float) -> None:
        rung = self._rung[topic]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await rung.wait()
        rung.clear()

    def row(self) -> dict[str, float]:
        return {}
