"""Sessions: who may talk, how long, how they are taken and ended, and what a dead worker costs."""

import asyncio
import os
import shutil
import signal
import ssl
from typing import Any

import aiohttp
import pytest

from treadle_core.errors import InvalidFieldError
from treadle_gateway.settings import Limits
from treadle_gateway.terms import (
    Outcome,
    SessionLostError,
    UnknownSessionError,
)
from treadle_gateway.testing import MODEL, Call, conversation, until
from treadle_runtime.workers import process
from treadle_runtime.workers.process import WorkerStartError

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

HI = {"model": MODEL, "messages": conversation("Hi")}


async def asked(world, url: str, headers: dict[str, str], body: Any = HI) -> tuple[int, Any]:
    async with world.http.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def end(world, access, **said: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {access.token}"}
    return await asked(world, access.urls["end"], headers, said)


def pid_of(world) -> int:
    (worker,) = world.pool._workers
    return worker._process.pid


@pytest.mark.parametrize("way", ["path", "header", "token"])
@pytest.mark.parametrize("shown", ["bearer", "key", "both", "one of two"])
async def test_a_token_is_shown_in_every_way_that_clients_have(world, way, shown) -> None:
    access = await world.open()
    other = "not-a-token-of-ours"
    headers = {
        "bearer": {"Authorization": f"Bearer {access.token}"},
        "key": {"x-api-key": access.token},
        "both": {"Authorization": f"Bearer {access.token}", "x-api-key": access.token},
        "one of two": {"Authorization": f"Bearer {other}", "x-api-key": access.token},
    }[shown]
    root = access.urls["anthropic"].removesuffix(f"/s/{access.session}")
    base = access.urls["openai"] if way == "path" else f"{root}/v1"
    if way == "header":
        headers["x-treadle-session"] = access.session
    status, _ = await asked(world, f"{base}/chat/completions", headers)
    assert status == 200
    captured = await world.pool.end(access.session)
    assert captured.counts["turns"] == 1


async def test_the_one_model_is_described_to_who_may_talk(world) -> None:
    access = await world.open()
    headers = {"x-api-key": access.token}
    url = f"{access.urls['openai']}/models"
    async with world.http.get(url, headers=headers) as answer:
        listed = await answer.json()
    assert [each["id"] for each in listed["data"]] == [MODEL]
    for path, shown, status in (("/policy", headers, 200), ("/gpt-9", headers, 404), ("", {}, 401)):
        async with world.http.get(f"{url}{path}", headers=shown) as answer:
            assert answer.status == status


async def test_a_token_opens_no_other_session(world) -> None:
    mine, other = await world.open(), await world.open()
    url = f"{other.urls['openai']}/chat/completions"
    for headers in ({}, {"x-api-key": mine.token}, {"Authorization": "Bearer "}):
        assert (await asked(world, url, headers))[0] == 401
    headers = {"x-api-key": mine.token, "x-treadle-session": other.session}
    root = mine.urls["anthropic"].removesuffix(f"/s/{mine.session}")
    assert (await asked(world, f"{root}/v1/chat/completions", headers))[0] == 401


async def test_an_ended_session_says_so_and_a_token_of_it_opens_nothing(world) -> None:
    access = await world.open()
    await world.pool.end(access.session)
    status, refused = await world.chat(access, "Hi")
    assert (status, refused["error"]["message"]) == (410, "session ended")
    root = access.urls["anthropic"].removesuffix(f"/s/{access.session}")
    status, _ = await asked(world, f"{root}/v1/chat/completions", {"x-api-key": access.token})
    assert status == 410
    with pytest.raises(UnknownSessionError):
        await world.pool.end(access.session)


async def test_the_end_of_a_session_ends_what_runs_in_it(world) -> None:
    async def forever(call: Call) -> None:
        await asyncio.Event().wait()

    world.policy.before = forever
    access = await world.open()
    asking = asyncio.create_task(world.chat(access, "Hi"))
    await until(lambda: world.policy.running == 1)
    captured = await world.pool.end(access.session)
    assert (await asking)[0] == 410
    await until(lambda: world.policy.running == 0)
    assert captured.segments == ()
    assert captured.counts["untrained.the session ended"] == 1


async def test_a_session_ends_when_its_time_is_over(world) -> None:
    access = await world.open(deadline_s=0.05)
    outcome = await world.pool.outcome(access.session)
    assert outcome == Outcome(expired=True)
    assert (await world.chat(access, "Hi"))[0] == 410
    assert (await world.pool.end(access.session)).outcome == outcome


ENDS = [
    ({"reward": 1}, Outcome(reward=1.0)),
    ({"turn_rewards": [0.5, 1], "metrics": {"tests": 3}}, Outcome(None, (0.5, 1.0), {"tests": 3})),
    ({"reward": -0.5, "truncated": True}, Outcome(reward=-0.5, truncated=True)),
    ({"no_reward": "the grader is down"}, Outcome(no_reward="the grader is down")),
    ({}, Outcome()),
]


@pytest.mark.parametrize(("said", "outcome"), ENDS, ids=lambda each: str(each)[:30])
async def test_a_client_ends_its_session_with_what_it_was_worth(world, said, outcome) -> None:
    access = await world.open()
    await world.chat(access, "Hi")
    waiting = asyncio.create_task(world.pool.outcome(access.session))
    assert (await end(world, access, **said))[0] == 200
    assert await waiting == outcome
    assert (await world.chat(access, "Hi"))[0] == 410
    assert (await end(world, access, **said))[0] == 410
    captured = await world.pool.end(access.session)
    assert captured.outcome == outcome
    assert captured.segments[0].num_trained == 7


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"reward": "1"}, "reward"),
        ({"reward": True}, "reward"),
        ({"reward": 1e7}, "reward"),
        ({"reward": 10**400}, "reward"),
        ({"turn_rewards": [1, None]}, "turn_rewards[1]"),
        ({"turn_rewards": 1}, "turn_rewards"),
        ({"metrics": {"a": []}}, "metrics.a"),
        ({"metrics": 3}, "metrics"),
        ({"truncated": 1}, "truncated"),
        ({"no_reward": 1}, "no_reward"),
        ({"no_reward": "x", "reward": 1}, "no_reward"),
        ({"rewrad": 1}, "rewrad"),
    ],
    ids=lambda each: str(each)[:30],
)
async def test_an_end_that_is_none_is_refused_and_the_session_goes_on(world, said, field) -> None:
    access = await world.open()
    status, refused = await end(world, access, **said)
    assert (status, refused["error"]["param"]) == (400, field)
    assert (await world.chat(access, "Hi"))[0] == 200
    assert (await world.pool.end(access.session)).outcome is None


async def test_a_session_has_a_most_of_requests(world) -> None:
    access = await world.open(max_requests=3)
    for _ in range(3):
        assert (await world.chat(access, "Hi"))[0] == 200
    status, refused = await world.chat(access, "Hi")
    assert (status, refused["error"]["code"]) == (400, "max_requests")  # not 429: it would go on
    assert "3" in refused["error"]["message"]


async def test_a_session_has_a_most_of_requests_at_once(world) -> None:
    hold = asyncio.Event()

    async def before(call: Call) -> None:
        await hold.wait()

    world.policy.before = before
    access = await world.open(max_concurrent=1)
    asking = asyncio.create_task(world.chat(access, "Hi"))
    await until(lambda: world.policy.running == 1)
    url, headers = f"{access.urls['openai']}/chat/completions", {"x-api-key": access.token}
    async with world.http.post(url, json=HI, headers=headers) as answer:
        assert answer.status == 429
        assert float(answer.headers["Retry-After"]) > 0
        assert "max_concurrent" in (await answer.json())["error"]["message"]
    hold.set()
    assert (await asking)[0] == 200


async def test_a_session_has_a_most_of_sampled_tokens(world) -> None:
    access = await world.open(max_sampled=9)
    assert (await world.chat(access, "Hi"))[0] == 200
    _, reply = await world.chat(access, "Hi there")
    assert reply["usage"]["completion_tokens"] == 2
    assert reply["choices"][0]["finish_reason"] == "length"
    status, refused = await world.chat(access, "Who")
    assert (status, refused["error"]["code"]) == (400, "max_sampled")


async def test_a_hundred_sessions_at_once_are_spread_and_none_mixes_with_another(
    world_of,
) -> None:
    async with world_of(workers=2) as world:
        world.policy.says = lambda prompt: prompt.rpartition("user\n")[2].partition("<")[0]
        world.policy.piece = 4

        async def play(name: str) -> Any:
            access = await world.open()
            said: list[str] = []
            for turn in range(3):
                said.append(f"{name}-{turn}")
                _, reply = await world.chat(access, *said)
                said.append(reply["choices"][0]["message"]["content"])
            return said, await world.pool.end(access.session), access.urls["openai"].split("/")[2]

        played = await asyncio.gather(*(play(f"session-{i:03}") for i in range(100)))
    assert len({host for _, _, host in played}) == 2
    for said, captured, _ in played:
        assert said[1::2] == said[::2]
        (segment,) = captured.segments
        text = world.policy.tokenizer.decode(segment.token_ids[segment.trained].tolist())
        assert text.split() == ["".join(said[1::2])] or all(each in text for each in said[1::2])
        assert segment.num_trained == sum(len(each) + 1 for each in said[1::2])


async def test_a_killed_worker_loses_its_sessions_and_another_takes_its_place(world_of) -> None:
    async with world_of() as world:
        access = await world.open()
        await world.chat(access, "Hi")
        waiting = asyncio.create_task(world.pool.outcome(access.session))
        await asyncio.sleep(0)
        os.kill(pid_of(world), signal.SIGKILL)
        with pytest.raises(SessionLostError):
            await waiting
        with pytest.raises(SessionLostError):
            await world.pool.end(access.session)
        await until(lambda: world.pool.restarts == 1)
        again = await world.open()
        assert (await world.chat(again, "Hi"))[0] == 200


async def test_a_worker_ends_by_itself_when_nobody_holds_its_line(world_of, monkeypatch) -> None:
    monkeypatch.setattr(process, "LAST_S", 60.0)
    async with world_of() as world:
        (worker,) = world.pool._workers
        worker._transport.abort()
        await asyncio.wait_for(worker.ended.wait(), 30)
        assert worker._process.returncode == 0


async def test_a_worker_that_cannot_read_the_model_says_why(world_of, tmp_path) -> None:
    with pytest.raises(WorkerStartError, match=r"tokenizer_config\.json|chat_template|found none"):
        async with world_of(model_folder=tmp_path, log=tmp_path / "log"):
            pass


async def test_a_gateway_does_not_listen_beyond_loopback_in_the_open(world_of) -> None:
    with pytest.raises(InvalidFieldError, match="loopback"):
        async with world_of(host="0.0.0.0"):  # noqa: S104
            pass


async def test_a_worker_has_a_most_of_requests_at_once(world_of) -> None:
    async with world_of(limits=Limits(requests=1)) as world:
        hold = asyncio.Event()

        async def before(call: Call) -> None:
            await hold.wait()

        world.policy.before = before
        first, second = await world.open(), await world.open()
        asking = asyncio.create_task(world.chat(first, "Hi"))
        await until(lambda: world.policy.running == 1)
        status, refused = await world.chat(second, "Hi")
        assert (status, refused["error"]["code"]) == (429, "requests")
        hold.set()
        assert (await asking)[0] == 200


async def test_all_bodies_on_their_way_have_a_most_of_bytes(world_of) -> None:
    async with world_of(limits=Limits(bodies_bytes=1000)) as world:
        access = await world.open()
        status, refused = await world.chat(access, "x" * 2000)
        assert (status, refused["error"]["code"]) == (429, "bodies_bytes")
        assert (await world.chat(access, "Hi"))[0] == 200
        captured = await world.pool.end(access.session)
        assert captured.counts["refused.busy"] == 1


async def test_with_a_certificate_the_wires_are_https(world_of, tmp_path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("nothing here makes certificates")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost")
    making = await asyncio.create_subprocess_exec(
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-keyout", str(key), "-out", str(certificate), "-days", "1", *subject),
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert await making.wait() == 0
    secure = {"certificate": certificate, "private_key": key, "advertise": "localhost"}
    async with world_of(**secure) as world:
        access = await world.open()
        url = f"{access.urls['openai']}/chat/completions"
        assert url.startswith("https://localhost:")
        headers = {"x-api-key": access.token}
        trusting = ssl.create_default_context(cafile=certificate)
        async with world.http.post(url, json=HI, headers=headers, ssl=trusting) as answer:
            assert answer.status == 200
        async with world.http.post(
            url, json=HI | {"stream": True}, headers=headers, ssl=trusting
        ) as answer:
            assert (await answer.read()).endswith(b"[DONE]\n\n")
        with pytest.raises(aiohttp.ClientError):
            await asked(world, url.replace("https", "http"), headers)
        captured = await world.pool.end(access.session)
        assert [segment.num_trained for segment in captured.segments] == [7, 7]
