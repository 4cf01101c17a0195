"""No bell at all: services hold the calls of those who wait."""

import asyncio
from collections.abc import Sequence

from treadle_runtime.doorbell import Doorbell, Topic


class PollDoorbell(Doorbell):
    """Doorbell `poll`. Nothing is ever heard, and nothing has to be installed or run."""

    def __init__(self, *, run_id: str, hears: Sequence[Topic] = ()) -> None:
        """Takes what every doorbell takes."""
        del run_id, hears

    async def __aexit__(self, *_: object) -> None:
        pass

    @property
    def is_live(self) -> bool:
        return False

    def ring(self, topic: Topic) -> None:
        pass

    async def wait(self, topic: Topic, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    def row(self) -> dict[str, float]:
        return {}
