"""Holds that arrive together are confirmed in one call a node."""

import asyncio

import pytest

from treadle_experience.confirming import Confirmer
from treadle_payloads.store import Hold, PayloadReference, PayloadStoreAwayError


def hold(number: int, node: str = "") -> Hold:
    return Hold(PayloadReference(f"{number:064x}", 1, node), f"e{number}")


class Node:
    """Answers a call once it is told to; `missing` is what it does not hold."""

    def __init__(self) -> None:
        self.calls: list[list[Hold]] = []
        self.called = asyncio.Semaphore(0)
        self.answer = asyncio.Event()
        self.missing: list[Hold] = []
        self.away: set[str] = set()

    async def confirm(self, holds: list[Hold]) -> list[Hold]:
        self.calls.append(holds)
        self.called.release()
        await self.answer.wait()
        if holds[0].reference.node in self.away:
            raise PayloadStoreAwayError("it does not answer")
        return [each for each in holds if each in self.missing]


async def test_what_arrives_during_a_call_goes_into_the_next_one() -> None:
    node = Node()
    confirmer = Confirmer(node.confirm)
    first = [asyncio.ensure_future(confirmer.confirm(hold(n))) for n in (1, 2)]
    await node.called.acquire()
    later = [asyncio.ensure_future(confirmer.confirm(hold(n))) for n in (3, 4, 5)]
    await asyncio.sleep(0)
    node.missing = [hold(4)]
    node.answer.set()

    assert await asyncio.gather(*first, *later) == [True, True, True, False, True]
    assert node.calls == [[hold(1), hold(2)], [hold(3), hold(4), hold(5)]]


async def test_who_is_away_holds_up_and_harms_no_other_node() -> None:
    node = Node()
    node.away = {"a:1"}
    confirmer = Confirmer(node.confirm)
    asked = [confirmer.confirm(hold(1, "a:1")), confirmer.confirm(hold(2, "b:1"))]
    asking = asyncio.gather(*asked, return_exceptions=True)
    for _ in range(2):
        await node.called.acquire()
    node.answer.set()

    refused, confirmed = await asking
    assert isinstance(refused, PayloadStoreAwayError)
    assert confirmed is True
    node.away = set()
    assert await confirmer.confirm(hold(1, "a:1"))


async def test_who_gives_up_takes_no_other_along() -> None:
    node = Node()
    confirmer = Confirmer(node.confirm)
    gone, stays = (asyncio.ensure_future(confirmer.confirm(hold(n))) for n in (1, 2))
    await node.called.acquire()
    gone.cancel()
    node.answer.set()

    assert await stays
    with pytest.raises(asyncio.CancelledError):
        await gone
