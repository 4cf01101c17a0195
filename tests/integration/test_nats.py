"""The NATS doorbell against a broker in a container: who waits may be late, and is never stuck."""

import asyncio

import pytest
from container_members import RECOVERY_S, server

from treadle_runtime.doorbell import Topic
from treadle_runtime.doorbells.nats import NatsDoorbell

pytestmark = pytest.mark.containers


@pytest.fixture
def nats(images):
    member = server("nats:2", "-js -sd /tmp/js", 4222)
    member.start()
    yield member
    member.remove()


async def is_heard(bell: NatsDoorbell, ringer: NatsDoorbell) -> None:
    """Returns once a ring is heard; a ring that is lost is rung again."""
    before = bell.row()["rings_heard"]
    async with asyncio.timeout(RECOVERY_S):
        while bell.row()["rings_heard"] == before:
            ringer.ring(Topic.TICKETS)
            await bell.wait(Topic.TICKETS, 0.5)


def killed(member) -> None:
    member.kill()
    member.start()


def forgetful(member) -> None:
    member.remove()
    member.start()


def stopped(member) -> None:
    member.stop()
    member.start()


def stood_still(member) -> None:
    with member.paused():
        pass


@pytest.mark.parametrize("fault", [killed, stopped, forgetful, stood_still])
async def test_rings_are_heard_again_after_a_fault(nats, fault) -> None:
    url = f"nats://127.0.0.1:{nats.port}"
    async with (
        NatsDoorbell(run_id="r", url=url, hears=[Topic.TICKETS]) as bell,
        NatsDoorbell(run_id="r", url=url) as ringer,
    ):
        await is_heard(bell, ringer)

        await asyncio.to_thread(fault, nats)

        await is_heard(bell, ringer)


async def test_nobody_waits_longer_than_told_for_a_broker_that_stands_still(nats) -> None:
    url = f"nats://127.0.0.1:{nats.port}"
    async with (
        NatsDoorbell(run_id="r", url=url, hears=[Topic.TICKETS]) as bell,
        NatsDoorbell(run_id="r", url=url) as ringer,
    ):
        await is_heard(bell, ringer)
        await asyncio.to_thread(nats.docker.pause)
        try:
            async with asyncio.timeout(1.5):
                ringer.ring(Topic.TICKETS)
                await bell.wait(Topic.TICKETS, 1.0)
        finally:
            await asyncio.to_thread(nats.docker.unpause)
