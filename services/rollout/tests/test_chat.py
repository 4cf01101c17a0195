"""Agents that talk by themselves: workers, gateway and engine of a replica, all real."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tokenizers import Tokenizer

from treadle_agents.record import Generated
from treadle_core.episodes import FailureClass, Segment, Termination
from treadle_core.tickets import Sampling, Ticket
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.terms import DrainingError, Outcome, UnknownSessionError
from treadle_gateway.testing import write_model
from treadle_payloads.codec import decode_payload
from treadle_payloads.files import FileStore
from treadle_rollout.adapters.gateway_sessions import GatewaySessions
from treadle_rollout.adapters.memory_experience import MemoryExperience
from treadle_rollout.adapters.script import Asked
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.adapters.worker_pool import AgentPool
from treadle_rollout.adapters.worker_process import WorkerSettings
from treadle_rollout.attempts import AttemptRunner, AttemptSettings
from treadle_rollout.conformance.tiny_model import TinyModel, tiny_config
from treadle_rollout.core.errors import SessionEndedError
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.players import ChatPlayer, ExternalPlayer, SessionTerms, Worth
from treadle_rollout.ports import Engine, GenerationRequest, Heard

pytestmark = pytest.mark.processes

AGENTS = Path(__file__).parent / "chat_agents.py"
RUN_TOKEN = "run-token-of-this-test"  # noqa: S105, good for nothing


class Listening(ScriptedEngine):
    """Keeps what it was asked and what it said."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.turns: list[tuple[GenerationRequest, Generated]] = []

    async def generate(self, request: GenerationRequest, heard: Heard | None = None) -> Generated:
        made = await super().generate(request, heard)
        self.turns.append((request, made))
        return made


def greets(asked: Asked) -> str:
    """Says how long the prompt was."""
    assert asked.text.endswith("<|im_start|>assistant\n")
    return f"hello {asked.token_ids.size}<|im_end|>"


@dataclass
class Rig:
    experience: MemoryExperience
    engine: Engine
    runner: AttemptRunner
    sessions: GatewaySessions
    state: ReplicaState

    async def run(self, *tickets: Ticket) -> list[str]:
        for each in tickets:  # as if leased
            self.experience._leased[each.episode_id] = each
        return list(await asyncio.gather(*map(self.runner.run, tickets)))

    def segments(self, episode: str = "e") -> tuple[Segment, ...]:
        data = self.experience.results[episode].inline
        assert data is not None
        return decode_payload(data)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("policy")
    write_model(found)
    return found


@pytest.fixture
def rig(folder: Path, tmp_path: Path) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def start(
        agent: str = "", engine: Any = None, *, failure_reward: float | None = None, **told: Any
    ) -> AsyncGenerator[Rig]:
        engine = engine or Listening(
            model=folder, weightless=True, stop_tokens=("<|im_end|>",), script=greets
        )
        if not engine.served_version:
            await engine.install(1)
        state = ReplicaState(8, started_at=0.0)
        settings = GatewaySettings(
            model_folder=folder,
            model_name="policy",
            max_context=engine.max_context,
            log=tmp_path / "gateway.log",
            run_token=RUN_TOKEN,
            supported=engine.samplings,
            **told,
        )
        sessions = GatewaySessions(settings, 1, engine, lambda tokens: None)
        await sessions.start()
        pool = None
        if agent:
            worker = WorkerSettings(
                folder / "tokenizer.json", f"{AGENTS}:{agent}", {}, 8, tmp_path / "agents.log", 0.2
            )
            pool = AgentPool(worker, 1)
            await pool.start()
        terms, worth = SessionTerms(), Worth(failure_reward)
        player = (
            ChatPlayer(pool, sessions, terms, worth, engine.max_context)
            if pool
            else ExternalPlayer(sessions, terms, 8)
        )
        experience = MemoryExperience([])
        runner = AttemptRunner(
            AttemptSettings("run"),
            experience,
            player,
            FileStore(tmp_path / "payloads"),
            on_counts=state.sessions.update,
        )
        supervised = [asyncio.create_task(each.run()) for each in (sessions, pool) if each]
        try:
            yield Rig(experience, engine, runner, sessions, state)
        finally:
            for task in supervised:
                task.cancel()
            await asyncio.wait(supervised)
            await engine.close()

    return start


def check_exact(segment: Segment, turns: list[tuple[GenerationRequest, Generated]]) -> None:
    """The segment is the last prompt and reply, and each turn stands where it was sampled."""
    request, made = turns[-1]
    whole = np.concatenate([request.token_ids, made.token_ids])
    assert np.array_equal(segment.token_ids, whole)
    sampled = np.zeros(whole.size, np.bool_)
    for request, made in turns:
        place = slice(request.token_ids.size, request.token_ids.size + made.token_ids.size)
        sampled[place] = True
        assert np.array_equal(segment.token_ids[: place.start], request.token_ids)
        assert np.array_equal(segment.token_ids[place], made.token_ids)
        assert np.array_equal(segment.logprobs[place], made.logprobs)
        assert np.array_equal(segment.policy_version[place], made.policy_version)
    assert np.array_equal(segment.sampled, sampled)


async def test_what_was_said_over_http_is_what_the_engine_sampled_token_for_token(
    rig: Callable[..., Any], ticket: Callable[..., Ticket], folder: Path
) -> None:
    async with rig("Talker") as r:
        asked = ticket(task={"prompt": "go"}, sampling=Sampling(max_tokens=200))
        assert await r.run(asked) == ["completed"]
        assert r.engine.sessions == frozenset()
    (segment,) = r.segments()
    check_exact(segment, r.engine.turns)
    assert np.array_equal(segment.trained, segment.sampled)
    result = r.experience.results["e"]
    assert (result.reward, result.termination) == (1.0, Termination.FINISHED)
    assert result.num_trained == sum(made.token_ids.size for _, made in r.engine.turns)
    assert {request.episode for request, _ in r.engine.turns} == {"e"}
    text = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(
        segment.token_ids.tolist(), skip_special_tokens=False
    )
    assert text.count("hello") == 3
    assert r.state.sessions["requests"] == r.state.sessions["turns"] == 3
    assert r.state.row(1, 0.0)["gateway_requests"] == 3


async def test_a_turn_of_a_model_has_the_logprobs_of_a_fresh_forward(
    rig: Callable[..., Any], ticket: Callable[..., Ticket], tmp_path: Path, folder: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = tiny_config()
    config.vocab_size = tokenizer.get_vocab_size()
    subject = TinyModel(config, tmp_path / "tiny")
    end = tokenizer.token_to_id("<|im_end|>")
    engine = subject.engine(slots=8, max_context=512, stop_tokens=(end,))
    engine.arrival[:] = subject.weights(1)
    await engine.install(1)
    names = [f"e{i}" for i in range(4)]
    async with rig("Talker", engine) as r:
        tickets = [
            ticket(name, task={"prompt": f"go {name}"}, sampling=Sampling(max_tokens=24))
            for name in names
        ]
        assert await r.run(*tickets) == ["completed"] * len(names)
    for name in names:
        segments = r.segments(name)
        assert sum(segment.num_trained for segment in segments) >= 24
        for segment in segments:
            fresh = subject.logprobs(1, segment.token_ids.copy(), 1.0)
            sampled = segment.sampled[1:]
            assert np.allclose(segment.logprobs[1:][sampled], fresh[sampled], atol=1e-4)


@pytest.mark.parametrize(
    ("do", "ended", "says"),
    [
        ("well", "completed", 0.5),
        ("says_nothing", "completed", None),
        ("reports", "completed", 3.0),
        ("refuses", "failed_policy", "not an answer"),
        ("raises", "failed_environment", "ValueError: no such tool"),
        ("mistypes", "failed_environment", "expected a treadle_agents.Result, got float"),
        ("hangs", "failed_environment", "hung"),
    ],
)
async def test_how_an_agent_ends_is_how_its_episode_ends(
    do: str,
    ended: str,
    says: Any,
    rig: Callable[..., Any],
    ticket: Callable[..., Ticket],
) -> None:
    async with rig("Streamer") as r:
        deadline_s = 3.0 if do == "hangs" else 60.0
        asked = ticket(task={"prompt": "go", "do": do}, deadline_s=deadline_s)
        assert await r.run(asked) == [ended]
        assert r.engine.sessions == frozenset()
    if ended == "completed":
        result = r.experience.results["e"]
        assert result.reward == says
        assert r.state.sessions["no_reward"] == (says is None)
        if do == "reports":
            assert (result.turn_rewards, result.metrics) == ((3.0,), {"m": 1.0})
    else:
        ((_, failure),) = r.experience.failures
        assert says in failure.message


async def test_a_failure_of_the_policy_is_worth_what_the_recipe_says(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with rig("Streamer", failure_reward=-1.0) as r:
        asked = ticket(task={"prompt": "go", "do": "refuses"})
        assert await r.run(asked) == ["completed"]
    result = r.experience.results["e"]
    assert (result.reward, result.termination) == (-1.0, Termination.FAILED)
    assert result.num_trained > 0


async def test_an_agent_that_never_asks_has_failed(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with rig("Silent") as r:
        assert await r.run(ticket()) == ["failed_environment"]
    ((_, failure),) = r.experience.failures
    assert failure.failure_class is FailureClass.ENVIRONMENT
    assert "before the policy said anything" in failure.message


async def test_an_evaluation_is_never_trained_on(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with rig("Talker") as r:
        assert await r.run(ticket(evaluation="held-out")) == ["completed"]
    assert r.experience.results["e"].num_trained == 0


async def test_a_gateway_that_went_down_costs_no_retry(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with rig("Streamer") as r:
        running = asyncio.create_task(r.run(ticket(task={"prompt": "go", "do": "hangs"})))
        async with asyncio.timeout(60):
            while not r.engine.turns:  # noqa: ASYNC110, what is waited for has no event
                await asyncio.sleep(0.01)
        await r.sessions.aclose()
        assert await running == ["handed_back"]
    assert [attempt.episode_id for attempt in r.experience.handed_back] == ["e"]
    assert r.experience.failures == []


async def test_a_stranger_takes_an_episode_plays_it_and_says_what_it_was_worth(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with rig() as r:
        running = asyncio.create_task(r.run(ticket(task={"prompt": "go", "answer": 4})))
        (url,) = r.sessions.urls
        async with aiohttp.ClientSession() as client:
            run = {"authorization": f"Bearer {RUN_TOKEN}"}
            async with client.post(f"{url}/sessions", json={"wait_s": 30}, headers=run) as reply:
                taken = await reply.json()
            assert taken["task"] == {"prompt": "go", "answer": 4}
            await chat(client, taken["urls"]["openai"], taken["token"])
            own = {"authorization": f"Bearer {taken['token']}"}
            body = {"reward": 2.0, "metrics": {"steps": 1}}
            async with client.post(taken["urls"]["end"], json=body, headers=own) as reply:
                assert reply.status == 200
        assert await running == ["completed"]
    result = r.experience.results["e"]
    assert (result.reward, dict(result.metrics)) == (2.0, {"steps": 1.0})
    check_exact(r.segments()[0], r.engine.turns)


async def test_a_request_takes_one_episode_however_often_it_is_sent(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with rig() as r:
        assert await r.sessions.take("first", 0.0) is None
        running = asyncio.create_task(r.run(ticket("a"), ticket("b")))
        first = await r.sessions.take("first", 30.0)
        again = await r.sessions.take("first", 30.0)
        other = await r.sessions.take("other", 30.0)
        assert first == again != other
        worth = Outcome(reward=1.0, turn_rewards=(0.25, 0.75))
        async with aiohttp.ClientSession() as client:
            for access, _ in (first, other):
                await chat(client, access.urls["openai"], access.token)
                for _ in range(2):
                    r.sessions.report(access.session, access.token, worth)
        with pytest.raises(SessionEndedError):
            r.sessions.report(first[0].session, first[0].token, Outcome(reward=9.0))
        assert await running == ["completed"] * 2
        with pytest.raises(UnknownSessionError):
            r.sessions.report("none", "token", worth)
    assert {each.turn_rewards for each in r.experience.results.values()} == {(0.25, 0.75)}


async def test_an_episode_that_nobody_takes_or_ends_is_issued_again(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with rig() as r:
        assert await r.run(ticket("a", deadline_s=0.3)) == ["failed_infrastructure"]
        running = asyncio.create_task(r.run(ticket("b", deadline_s=2.0)))
        taken = await r.sessions.take("first", 30.0)
        assert taken is not None
        assert await running == ["failed_environment"]
        offered = asyncio.create_task(r.run(ticket("c")))
        await asyncio.sleep(0)
        r.sessions.drain()
        assert await offered == ["handed_back"]
        with pytest.raises(DrainingError):
            await r.sessions.take("later", 30.0)
    assert [failure.message.split(" within")[0] for _, failure in r.experience.failures] == [
        "nobody took the episode",
        "its client did not end the session",
    ]


async def chat(client: aiohttp.ClientSession, url: str, token: str) -> Any:
    body = {"model": "policy", "messages": [{"role": "user", "content": "go"}]}
    headers = {"authorization": f"Bearer {token}"}
    async with client.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return json.loads(await reply.text())
