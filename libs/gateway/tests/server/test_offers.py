"""Episodes that are offered to clients, which take them with the run's token."""

import asyncio
from typing import Any

import pytest

from treadle_core.tickets import Sampling
from treadle_gateway.terms import DrainingError, SessionSpec
from treadle_gateway.testing import MODEL, conversation, until

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

RUN_TOKEN = "the run's own token"  # noqa: S105
HI = {"model": MODEL, "messages": conversation("Hi")}


async def asked(world, url: str, headers: dict[str, str], body: Any = HI) -> tuple[int, Any]:
    async with world.http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def take(world, **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {RUN_TOKEN}"}
    return await asked(world, f"{world.pool.urls[0]}/sessions", headers, body)


SPEC = SessionSpec(
    Sampling(max_tokens=64), deadline_s=60.0, task={"prompt": "Say hi.", "seed": 10**30}
)


async def test_a_client_takes_an_offered_episode_and_ends_it(world_of) -> None:
    async with world_of(run_token=RUN_TOKEN) as world:
        for offered_first in (True, False):
            if offered_first:
                offering = asyncio.create_task(world.pool.offer(SPEC))
                await asyncio.sleep(0)
                status, taken = await take(world)
            else:
                taking = asyncio.create_task(take(world))
                await until(lambda: bool(world.pool._clients))
                offering = asyncio.create_task(world.pool.offer(SPEC))
                status, taken = await taking
            access = await offering
            assert status == 200
            assert taken["task"] == SPEC.task
            assert (taken["session"], taken["token"]) == (access.session, access.token)
            headers = {"x-api-key": taken["token"]}
            url = f"{taken['urls']['openai']}/chat/completions"
            assert (await asked(world, url, headers))[0] == 200
            assert (await asked(world, taken["urls"]["end"], headers, {"reward": 1}))[0] == 200
            assert (await world.pool.outcome(access.session)).reward == 1.0
            assert (await world.pool.end(access.session)).segments[0].num_trained == 7


async def test_without_an_offer_a_client_is_told_to_come_again(world_of) -> None:
    async with world_of(run_token=RUN_TOKEN) as world:
        status, refused = await take(world, wait_s=0.05)
        assert status == 503
        assert "no episode" in refused["error"]["message"]
        await until(lambda: not world.pool._clients)
        offering = asyncio.create_task(world.pool.offer(SPEC))
        await asyncio.sleep(0)
        offering.cancel()
        await asyncio.wait({offering})
        assert (await take(world, wait_s=0.05))[0] == 503
        assert (await take(world, wait_s="soon"))[0] == 400


async def test_an_offer_that_is_withdrawn_while_a_client_comes_is_not_given(world_of) -> None:
    async with world_of(run_token=RUN_TOKEN) as world:
        withdrawn = asyncio.create_task(world.pool.offer(SPEC))
        kept = asyncio.create_task(world.pool.offer(SPEC))
        await asyncio.sleep(0)
        taking = asyncio.create_task(take(world))
        withdrawn.cancel()
        world.pool._match()
        assert (await taking)[1]["session"] == (await kept).session
        assert withdrawn.cancelled()


async def test_only_the_run_token_takes_an_episode(world, world_of) -> None:
    for headers in ({}, {"x-api-key": "guess"}, {"x-api-key": ""}):
        status, _ = await asked(world, f"{world.pool.urls[0]}/sessions", headers, {})
        assert status == 401
    access = await world.open()
    headers = {"x-api-key": access.token}
    assert (await asked(world, f"{world.pool.urls[0]}/sessions", headers, {}))[0] == 401


async def test_an_episode_that_was_given_to_a_client_that_had_left_is_told(world_of) -> None:
    async with world_of(run_token=RUN_TOKEN) as world:
        taking = asyncio.create_task(take(world))
        await until(lambda: bool(world.pool._clients))
        (client,) = world.pool._clients
        taking.cancel()
        await until(lambda: not world.pool._clients)
        world.pool._clients.append(client)  # as if its leaving were still on its way
        access = await world.pool.offer(SPEC)
        outcome = await world.pool.outcome(access.session)
        assert outcome.expired
        assert "left" in outcome.no_reward


async def test_a_gateway_that_drains_opens_nothing_and_lets_sessions_end(world_of) -> None:
    async with world_of(run_token=RUN_TOKEN) as world:
        access = await world.open()
        offering = asyncio.create_task(world.pool.offer(SPEC))
        await asyncio.sleep(0)
        world.pool.drain()
        for refused in (offering, world.pool.offer(SPEC), world.open()):
            with pytest.raises(DrainingError):
                await refused
        headers = {"x-api-key": RUN_TOKEN}
        url = f"{world.pool.urls[0]}/sessions"
        async with world.http.post(url, json={}, headers=headers) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
        assert (await world.chat(access, "Hi"))[0] == 200
        assert (await world.pool.end(access.session)).segments[0].num_trained == 7
