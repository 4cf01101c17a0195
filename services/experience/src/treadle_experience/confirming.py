"""Holds of payloads, confirmed together: whatever arrives during a call goes into the next one."""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from treadle_payloads.store import Hold

Confirm = Callable[[list[Hold]], Awaitable[Collection[Hold]]]
"""Confirms holds on one node in one call; returns those whose bytes are not there."""


class Confirmer:
    """One call at a time for each node, so that one that is away holds up no other."""

    def __init__(self, confirm: Confirm) -> None:
        self._confirm = confirm
        self._waiting: dict[str, list[tuple[Hold, asyncio.Future[bool]]]] = {}
        """For each node that is being called, what goes into its next call."""
        self._calling: set[asyncio.Task[None]] = set()

    async def confirm(self, hold: Hold) -> bool:
        """Whether its bytes are there, and stay from now on. Raises what the call raises."""
        node = hold.reference.node
        if node not in self._waiting:
            self._waiting[node] = []
            calling = asyncio.ensure_future(self._call(node))
            self._calling.add(calling)
            calling.add_done_callback(self._calling.discard)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[node].append((hold, answer))
        return await answer

    async def _call(self, node: str) -> None:
        """Calls until nothing waits. What arrived in the same turn of the loop goes together."""
        while together := self._waiting[node]:
            self._waiting[node] = []
            try:
                missing = set(await self._confirm([hold for hold, _ in together]))
            except Exception as error:  # noqa: BLE001, each who waits raises it
                for _, answer in together:
                    if not answer.done():
                        answer.set_exception(error)
            else:
                for hold, answer in together:
                    if not answer.done():
                        answer.set_result(hold not in missing)
        del self._waiting[node]
