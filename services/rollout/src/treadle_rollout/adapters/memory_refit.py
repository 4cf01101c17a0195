"""Refit `memory`: gives one engine the orders that it is told to give, and forgets it all."""

import asyncio
import contextlib
from dataclasses import dataclass, field

from treadle_rollout.ports import Membership, Order
from treadle_weights.layouts import Layout


@dataclass(slots=True)
class MemoryRefit:
    """Answers every call with the order given last; to try an engine alone, and to test."""

    heard: list[Membership] = field(default_factory=list[Membership], init=False)
    """What the engine said, call by call, since the last order."""
    _order: Order | None = field(default=None, init=False)
    _ordered: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _said: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def attend(self, member: Membership, layout: Layout, *, wait_s: float) -> Order | None:
        self.heard.append(member)
        self._said.set()
        if self._order is None:
            self._ordered.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ordered.wait()
        return self._order

    def give(self, order: Order | None) -> None:
        """Gives an order, which wakes the engine; None: there is nothing to do."""
        self._order = order
        self.heard.clear()
        self._ordered.set()

    async def hears(self, **expected: object) -> Membership:
        """Waits until the engine says something with these values; returns what."""
        while True:
            for member in self.heard:
                if all(getattr(member, name) == value for name, value in expected.items()):
                    return member
            self._said.clear()
            await self._said.wait()
