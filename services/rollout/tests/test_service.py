"""The service as a process, between a ledger and a refit that this test serves over gRPC."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import urllib.request
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
import yaml

from treadle.episode.v1 import episode_pb2
from treadle.experience.v1 import experience_service_pb2 as experience_pb
from treadle.experience.v1 import experience_service_pb2_grpc as experience_grpc
from treadle.refit.v1 import refit_service_pb2 as refit_pb
from treadle.refit.v1 import refit_service_pb2_grpc as refit_grpc
from treadle.rollout.v1 import rollout_service_pb2 as rollout_pb
from treadle.rollout.v1.rollout_service_pb2_grpc import RolloutServiceStub
from treadle_core.episodes import FailureClass, Termination
from treadle_core.tickets import Sampling, Ticket
from treadle_gateway.testing import write_model
from treadle_payloads.codec import decode_payload
from treadle_payloads.store import PayloadReference
from treadle_rollout import wire
from treadle_rollout.adapters.memory_experience import MemoryExperience
from treadle_rollout.ports import Failure, Result
from treadle_runtime.channel import connect
from treadle_runtime.fields import duration
from treadle_runtime.interceptors import CallInterceptor
from treadle_weights.layouts import whole
from treadle_weights.plan import plan
from treadle_weights.shared_memory import SharedMemory
from treadle_weights.transport import LoadOrder
from treadle_weights.wire import layout_from_wire, load_order_to_wire

pytestmark = pytest.mark.processes

AGENTS = Path(__file__).parent / "bad_agents.py"
GREETING = f"{Path(__file__).parent / 'chat_agents.py'}:greeting"


class Ledger(experience_grpc.ExperienceServiceServicer):
    def __init__(self, experience: MemoryExperience) -> None:
        self.experience = experience

    async def LeaseTickets(self, request: Any, context: Any) -> Any:
        lease = await self.experience.lease(
            served_version=request.served_version,
            max_tickets=request.max_tickets,
            slots=request.slots,
            wait_s=request.wait.ToTimedelta().total_seconds(),
        )
        return experience_pb.LeaseTicketsResponse(
            tickets=map(ticket_to_wire, lease.tickets),
            lease=duration(lease.lease_s),
            complete=lease.complete,
        )

    async def RenewLeases(self, request: Any, context: Any) -> Any:
        revoked = await self.experience.renew(
            wire.attempts_from_wire(request.attempts),
            served_version=request.served_version,
            timeout_s=1.0,
        )
        return experience_pb.RenewLeasesResponse(revoked=wire.attempts_to_wire(revoked))

    async def CompleteEpisode(self, request: Any, context: Any) -> Any:
        (attempt,) = wire.attempts_from_wire([request.attempt])
        await self.experience.complete(attempt, result_from_wire(request.result))
        return experience_pb.CompleteEpisodeResponse()

    async def FailEpisode(self, request: Any, context: Any) -> Any:
        (attempt,) = wire.attempts_from_wire([request.attempt])
        name = episode_pb2.FailureClass.Name(request.failure_class)
        failure_class = FailureClass(name.removeprefix("FAILURE_CLASS_").lower())
        failure = Failure(failure_class, request.message, request.traceparent)
        await self.experience.fail(attempt, failure)
        return experience_pb.FailEpisodeResponse()

    async def ReturnTickets(self, request: Any, context: Any) -> Any:
        await self.experience.hand_back(wire.attempts_from_wire(request.attempts))
        return experience_pb.ReturnTicketsResponse()


class OneVersion(refit_grpc.RefitServiceServicer):
    """Brings every engine to version 1."""

    def __init__(self, run_id: str, vocabulary: int) -> None:
        self.heard: list[Any] = []
        bigrams = np.ones((vocabulary, vocabulary), np.float32)
        self.layout = whole({"bigrams": ("float32", bigrams.shape)})
        self._sender = SharedMemory().sender(run_id)
        arena = SharedMemory().arena(run_id, 1, self.layout.size())
        digests = self._sender.send(arena, self.layout, [("bigrams", bigrams)])
        self._order = LoadOrder(1, arena, self.layout, plan(self.layout, self.layout), digests)

    async def Attend(self, request: Any, context: Any) -> Any:
        self.heard.append(request)
        assert layout_from_wire(request.layout) == self.layout
        if request.serving == 1:
            await asyncio.sleep(0.2)
            return refit_pb.AttendResponse()
        if request.verified == 1:
            return refit_pb.AttendResponse(install=refit_pb.InstallOrder(version=1))
        return refit_pb.AttendResponse(load=load_order_to_wire(self._order))

    def close(self) -> None:
        self._sender.close()


def ticket_to_wire(ticket: Ticket) -> experience_pb.Ticket:
    return experience_pb.Ticket(
        episode_id=ticket.episode_id,
        attempt=ticket.attempt,
        task_id=ticket.task_id,
        index=ticket.index,
        spec_json=json.dumps(ticket.spec).encode(),
        temperature=ticket.sampling.temperature,
        max_tokens=ticket.sampling.max_tokens,
        deadline=duration(ticket.deadline_s),
        evaluation=ticket.evaluation,
    )


def result_from_wire(message: Any) -> Result:
    name = episode_pb2.Termination.Name(message.termination)
    payload = message.payload
    return Result(
        reward=message.reward if message.HasField("reward") else None,
        termination=Termination(name.removeprefix("TERMINATION_").lower()),
        num_tokens=message.num_tokens,
        num_trained=message.num_trained,
        versions=tuple(message.versions),
        payload=PayloadReference(payload.sha256, payload.size),
        inline=payload.inline if payload.HasField("inline") else None,
        metrics=dict(message.metrics),
        turn_rewards=tuple(message.turn_rewards),
        traceparent=message.traceparent,
    )


@dataclass
class World:
    """A run directory, its ledger and its refit."""

    run: Path
    experience: MemoryExperience
    refit: OneVersion
    config: dict[str, Any]

    async def start(self, **changed: Any) -> asyncio.subprocess.Process:
        file = self.run / "rollout.yaml"
        file.write_text(yaml.safe_dump(self.config | changed))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "treadle_rollout.main", "--config", str(file)),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def rows(self) -> list[dict[str, Any]]:
        lines = (self.run / "metrics" / "rollout.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def world(tokenizer: Path, tmp_path: Path) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def begin(tickets: list[Ticket], vocabulary: int = 6) -> AsyncGenerator[World]:
        run_id = f"run-{uuid.uuid4().hex[:12]}"
        address = f"unix:{tmp_path}/peers"
        ledger, refit = Ledger(MemoryExperience(tickets)), OneVersion(run_id, vocabulary)
        server = grpc.aio.server(interceptors=[CallInterceptor("treadle.test")])
        experience_grpc.add_ExperienceServiceServicer_to_server(ledger, server)
        refit_grpc.add_RefitServiceServicer_to_server(refit, server)
        server.add_insecure_port(address)
        await server.start()
        config = {
            "run": {"id": run_id, "dir": str(tmp_path), "model": str(tokenizer.parent)},
            "listen": f"unix:{tmp_path}/rollout",
            "experience_address": address,
            "refit_address": address,
            "engine": {"name": "scripted", "vocabulary": vocabulary},
            "agent": {"name": f"{AGENTS}:Counting", "turns": 2},
            "slots": 8,
            "max_turns": 8,
        }
        try:
            yield World(tmp_path, ledger.experience, refit, config)
        finally:
            refit.close()
            await server.stop(None)

    return begin


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110, what is waited for is in another process
            await asyncio.sleep(0.01)


async def test_a_replica_loads_a_version_runs_all_tickets_and_ends(
    world: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    tickets = [ticket(f"e{i}", sampling=Sampling(max_tokens=500)) for i in range(20)]
    async with world(tickets) as w:
        process = await w.start()
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    assert {r.reward for r in w.experience.results.values()} == {2.0}
    assert len(w.experience.results) == 20
    for result in w.experience.results.values():
        (segment,) = decode_payload(result.inline)
        assert (segment.num_tokens, segment.num_trained) == (result.num_tokens, result.num_trained)
        assert result.versions == (1,)
        assert len(result.traceparent) == 55
    last = w.rows()[-1]
    sampled = sum(r.num_trained for r in w.experience.results.values())
    assert (last["name"], last["attempts_completed"], last["running"]) == ("rollout", 20, 0)
    assert (last["sampled_tokens"], last["served_version"]) == (sampled, 1)
    assert w.refit.heard[-1].draining


async def test_a_stopped_replica_hands_its_tickets_back_and_ends_well(
    world: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with world([ticket(f"e{i}") for i in range(20)]) as w:
        process = await w.start(
            engine={"name": "scripted", "vocabulary": 6, "token_s": 30.0}, grace_s=0.2
        )
        async with connect(w.config["listen"]) as channel:
            stub = RolloutServiceStub(channel)

            async def replica() -> rollout_pb.GetReplicaResponse:
                request = rollout_pb.GetReplicaRequest()
                return await stub.GetReplica(request, wait_for_ready=True, timeout=20)

            async with asyncio.timeout(20):
                while (seen := await replica()).running < 8:  # noqa: ASYNC110, in another process
                    await asyncio.sleep(0.02)
        assert (seen.slots, seen.served_version, seen.draining) == (8, 1, False)
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    assert {a.episode_id for a in w.experience.handed_back} == {f"e{i}" for i in range(8)}
    assert w.experience.failures == []
    assert any(said.draining for said in w.refit.heard)


async def test_the_agents_of_a_killed_replica_end_by_themselves(
    world: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with world([ticket(task={"prompt": "c", "do": "leaves_a_child"})]) as w:
        log = w.run / "logs" / "agents-0.log"
        process = await w.start(agent={"name": f"{AGENTS}:Chosen"})
        await until(lambda: log.exists() and "child" in log.read_text())
        pids = [int(log.read_text().split()[1])]
        pids += [int(pid) for pid in children(process.pid)]
        process.kill()
        await process.communicate()
        await until(lambda: all(map(gone, pids)))
    assert len(pids) == 2


async def test_a_client_plays_an_episode_of_a_replica_that_has_no_agents(
    world: Callable[..., Any], ticket: Callable[..., Ticket], tmp_path: Path
) -> None:
    vocabulary = write_model(tmp_path / "policy").get_vocab_size()
    asked = ticket(task={"prompt": "go"}, sampling=Sampling(max_tokens=200))
    async with world([asked], vocabulary) as w:
        process = await w.start(
            run=w.config["run"] | {"model": str(tmp_path / "policy")},
            engine={"name": "scripted", "stop_tokens": ["<|im_end|>"], "script": GREETING},
            agent={"name": "external"},
        )
        async with connect(w.config["listen"]) as channel:
            stub = RolloutServiceStub(channel)
            request = rollout_pb.OpenSessionRequest(request_id="r1", wait=duration(20.0))
            opened = await stub.OpenSession(request, wait_for_ready=True, timeout=60)
            assert json.loads(opened.task_json) == {"prompt": "go"}
            assert (opened.temperature, opened.max_tokens) == (1.0, 200)
            said = await asyncio.to_thread(chat, opened)
            end = rollout_pb.EndSessionRequest(session=opened.session, reward=1.0)
            with pytest.raises(grpc.aio.AioRpcError, match="token: expected the token of"):
                await stub.EndSession(end, timeout=60)
            end.token = opened.token
            await stub.EndSession(end, timeout=60)
        _, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
    result = w.experience.results["e"]
    (segment,) = decode_payload(result.inline)
    assert (result.reward, result.num_trained) == (1.0, len("hello") + 1)
    assert said["choices"][0]["message"]["content"] == "hello"
    assert said["usage"]["total_tokens"] == segment.num_tokens
    last = w.rows()[-1]
    assert (last["gateway_requests"], last["sampled_tokens"]) == (1, result.num_trained)


async def test_a_replica_that_plays_itself_gives_no_episode_away(
    world: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with world([ticket()]) as w:
        process = await w.start(engine={"name": "scripted", "vocabulary": 6, "token_s": 30.0})
        async with connect(w.config["listen"]) as channel:
            stub = RolloutServiceStub(channel)
            opening = rollout_pb.OpenSessionRequest(request_id="r")
            ending = rollout_pb.EndSessionRequest(session="s")
            for call in (
                stub.OpenSession(opening, wait_for_ready=True, timeout=60),
                stub.EndSession(ending, wait_for_ready=True, timeout=60),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match="expected external"):
                    await call
        process.kill()
        await process.communicate()


def chat(opened: rollout_pb.OpenSessionResponse) -> Any:
    body = {"model": opened.model, "messages": [{"role": "user", "content": "go"}]}
    request = urllib.request.Request(  # noqa: S310, of the gateway
        f"{opened.openai_url}/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {opened.token}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
        return json.load(reply)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        pytest.param(
            {
                "slots": 0,
                "max_turn": 3,
                "engine": {"name": "scripted", "stop_token": 3},
                "agent": {"name": "nowhere.py:Agent"},
            },
            [
                "slots: Input should be greater than or equal to 1",
                "unknown key max_turn; did you mean max_turns",
                "did you mean stop_tokens",
                "nowhere.py: no such file",
            ],
            id="all-at-once",
        ),
        pytest.param(
            {"agent": {"name": f"{AGENTS}:BadConstructor"}}, ["OSError: no display"], id="agent"
        ),
        pytest.param(
            {"run": {"id": "run", "dir": "nowhere", "model": "/nowhere"}},
            ["run.model: expected a folder with tokenizer.json"],
            id="model",
        ),
        pytest.param({"agent": {"name": "external"}}, ["gateway: "], id="template"),
        pytest.param(
            {"agent": {"name": "external"}, "gateway": {"run_token_env": "NONE_SUCH"}},
            ["gateway.run_token_env: expected at least 16 characters, got 0"],
            id="run-token",
        ),
    ],
)
async def test_a_wrong_configuration_ends_the_process_with_its_reasons(
    world: Callable[..., Any], changed: dict[str, Any], says: list[str]
) -> None:
    async with world([]) as w:
        process = await w.start(**changed)
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert [line for line in says if line not in errors.decode()] == []
