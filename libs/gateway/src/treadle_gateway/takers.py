"""Clients of a worker that wait for an offered episode, as the worker sees them."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from treadle_gateway.errors import RETRY_S, RefusedError
from treadle_gateway.frames import Say
from treadle_gateway.sessions import Sessions
from treadle_runtime.workers.framing import Packer

DRAINING_S = 5.0
"""When to come again to a gateway that drains."""


@dataclass(slots=True)
class Takers:
    """Asks the replica for episodes."""

    packer: Packer[Say]
    sessions: Sessions
    draining: bool = False
    _keys: "count[int]" = field(default_factory=count, init=False)
    _waiting: dict[int, "asyncio.Future[Mapping[str, Any] | None]"] = field(
        default_factory=dict[int, "asyncio.Future[Mapping[str, Any] | None]"], init=False
    )

    async def take(self, wait_s: float) -> Mapping[str, Any]:
        """An episode: its session is open on this worker. Raises RefusedError."""
        self._check()
        key = next(self._keys)
        taken = self._waiting[key] = asyncio.get_running_loop().create_future()
        self.packer.send(Say.TAKE, key)
        try:
            async with asyncio.timeout(wait_s):
                offered = await taken
        except TimeoutError:
            message = f"no episode was offered within {wait_s:g} s"
            raise RefusedError("unavailable", message, retry_after_s=RETRY_S) from None
        finally:
            del self._waiting[key]
            if not taken.done() or taken.cancelled():
                self.packer.send(Say.LEAVE, key)
        if offered is None:
            self._check()
            raise RefusedError("unavailable", "no episode is offered", retry_after_s=RETRY_S)
        return offered

    def hear(self, key: int, offered: Mapping[str, Any] | None) -> None:
        """Takes a TAKEN."""
        taken = self._waiting.get(key)
        if taken is not None and not taken.done():
            taken.set_result(offered and {**offered, "task": json.loads(offered["task"])})
        elif offered is not None:
            self.sessions.untaken(offered["session"])

    def _check(self) -> None:
        if self.draining:
            message = "the gateway drains: no new sessions"
            raise RefusedError("unavailable", message, retry_after_s=DRAINING_S)
