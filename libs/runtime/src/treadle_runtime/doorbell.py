"""Doorbells: who waits for a change is woken instead of holding a call open.

A ring says that it is worth asking again, and nothing else. Rings may be lost, repeated and late:
who waits asks again after SWEEP_S seconds at the latest, whatever it heard.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import Protocol, TypeVar

from treadle_runtime.config import RunConfig
from treadle_runtime.plugins import build

GROUP = "treadle.doorbells"

SWEEP_S = 5.0
"""Seconds after which who waits at a doorbell asks again, rung or not."""

A = TypeVar("A")


class Topic(StrEnum):
    """What changed in a run."""

    TICKETS = "tickets"
    """There may be tickets to lease, or the run is complete."""
    BATCHES = "batches"
    """There may be a batch to claim, or the run is complete."""
    VERSIONS = "versions"
    """There may be another order for an engine."""


class Doorbell(AbstractAsyncContextManager["Doorbell"], Protocol):
    """The bells of one run, in one process (entry points `treadle.doorbells`).

    A plugin is constructed with `run_id`, `hears` (the topics that this process waits for) and what
    the recipe says. It works between enter and exit, neither of which fails or waits because a
    broker is away.
    """

    @property
    def is_live(self) -> bool:
        """Whether rings are heard here now. Where not, a waiter lets the service hold its call."""
        ...

    def ring(self, topic: Topic) -> None:
        """Wakes who waits for `topic`, soon. Never raises, never blocks; many rings may be one."""
        ...

    async def wait(self, topic: Topic, timeout_s: float) -> None:
        """Returns at a ring, or after `timeout_s` seconds.

        A ring since the last wait for `topic` returned counts, so that nothing is missed between
        asking and waiting. One waiter a topic; `topic` is one of those that this process hears.
        """
        ...

    def row(self) -> dict[str, float]:
        """Counts since the start: `rings_sent`, `rings_failed` and `rings_heard`."""
        ...


def of_run(run: RunConfig, *, hears: Sequence[Topic] = ()) -> Doorbell:
    """The doorbell that a run's configuration names, for a process that waits for `hears`."""
    bell: Doorbell = build(GROUP, run.doorbell, run_id=run.id, hears=hears)
    return bell


async def ask_until(
    bell: Doorbell,
    topic: Topic,
    ask: Callable[[float], Awaitable[A]],
    enough: Callable[[A], bool],
    *,
    wait_s: float,
) -> A:
    """Waits up to `wait_s` seconds for an answer that is `enough`; returns the last one.

    `ask` takes how many seconds the service may hold the call: none while the bell is live, which
    is then waited at between two questions; else all, and its answer is the last.
    """
    clock = asyncio.get_running_loop().time
    until, left_s = clock() + wait_s, wait_s
    while True:
        live = bell.is_live
        answer = await ask(0.0 if live else left_s)
        left_s = max(0.0, until - clock())
        if not live or enough(answer) or not left_s:
            return answer
        await bell.wait(topic, min(SWEEP_S, left_s))
        left_s = max(0.0, until - clock())
