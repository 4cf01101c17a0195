import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from treadle_agents.record import Generated
from treadle_core.episodes import FailureClass, Segment, Termination
from treadle_core.errors import Kind
from treadle_core.tickets import Sampling, Ticket
from treadle_payloads.codec import decode_payload
from treadle_payloads.files import FileStore
from treadle_payloads.store import INLINE_LIMIT
from treadle_rollout.adapters.memory_experience import MemoryExperience
from treadle_rollout.adapters.script import Asked, Script
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.attempts import AttemptRunner, AttemptSettings
from treadle_rollout.core.replica import ReplicaState
from treadle_rollout.players import EnvPlayer, Worth
from treadle_rollout.ports import Attempt, GenerationRequest, Heard, Lease, Result
from treadle_rollout.replica import Replica, ReplicaSettings
from treadle_runtime.doorbell import Doorbell, Topic
from treadle_runtime.doorbells.memory import MemoryDoorbell
from treadle_runtime.doorbells.poll import PollDoorbell
from treadle_runtime.errors import PEER_AWAY, RemoteError

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

END = 1
FOR_EVER = 30.0
"""Seconds: longer than any test."""


def says(*ids: int) -> Script:
    return lambda asked: [*ids]


@dataclass
class Rig:
    """A replica with real workers, a scripted engine and a ledger in memory."""

    experience: MemoryExperience
    engine: ScriptedEngine
    state: ReplicaState
    replica: Replica
    store: FileStore

    def segment(self, episode: str = "e") -> Segment:
        (segment,) = decode_payload(self.bytes_of(self.experience.results[episode]))
        return segment

    def bytes_of(self, result: Result) -> bytes:
        return self.store.get(result.payload) if result.inline is None else result.inline


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(FOR_EVER):
        while not holds():  # noqa: ASYNC110, what is waited for has no event
            await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def store(tmp_path_factory: Any) -> FileStore:
    return FileStore(tmp_path_factory.mktemp("payloads"))


@pytest.fixture
def rig(pools: Callable[[str], Any], store: FileStore) -> Callable[..., Any]:
    @contextlib.asynccontextmanager
    async def start(
        tickets: list[Ticket],
        engine: ScriptedEngine | None = None,
        agent: str = "Counting",
        *,
        slots: int = 8,
        lease_s: float = 10.0,
        retries: int = 2,
        failure_reward: float | None = None,
        delivery_s: float = 10.0,
        inline_bytes: int = INLINE_LIMIT,
        grace_s: float = 0.0,
        serving: bool = True,
        ledger: type[MemoryExperience] = MemoryExperience,
        bell: Doorbell | None = None,
    ) -> AsyncGenerator[Rig]:
        pool = await pools(agent)
        experience = ledger(tickets, lease_s=lease_s, retries=retries)
        engine = engine or ScriptedEngine(script=says(0, 2, END))
        if serving:
            await engine.install(1)
        state = ReplicaState(slots, started_at=0.0)

        def count(tokens: int) -> None:
            state.sampled_tokens += tokens

        player = EnvPlayer(engine, pool, 8, Worth(failure_reward), count)
        settings = AttemptSettings("run", delivery_s, inline_bytes)
        runner = AttemptRunner(settings, experience, player, store)
        replica = Replica(
            ReplicaSettings(slots, wait_s=0.05, grace_s=grace_s),
            experience=experience,
            bell=bell or PollDoorbell(run_id="run"),
            engine=engine,
            runner=runner,
            state=state,
        )
        yield Rig(experience, engine, state, replica, store)

    return start


async def test_what_is_recorded_is_what_was_sampled_and_never_tokenised_again(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    # The policy says `a` and `b`; the tokenizer, asked again, would make `ab` of them.
    async with rig([ticket()]) as r:
        await r.replica.run()
    segment = r.segment()
    assert segment.token_ids.tolist() == [4, 0, 2, END, 3, 0, 2, END, 3, 0, 2, END]
    assert np.flatnonzero(~segment.sampled).tolist() == [0, 4, 8]
    result = r.experience.results["e"]
    assert (result.reward, result.termination) == (3.0, Termination.FINISHED)
    assert (result.num_tokens, result.num_trained, result.versions) == (12, 9, (1,))
    assert r.state.sampled_tokens == 9
    assert r.engine.sessions == frozenset()


async def test_a_version_installed_within_a_turn_is_recorded_token_by_token(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    def script(asked: Asked) -> list[int]:
        loop = asyncio.get_running_loop()
        swap = partial(engine.install, engine.served_version + 1)
        loop.call_later(0.03, lambda: swaps.append(loop.create_task(swap())))
        return [0, 2, 0, 2, END]

    swaps: list[asyncio.Task[None]] = []
    engine = ScriptedEngine(script=script, token_s=0.02)
    async with rig([ticket()], engine) as r:
        await r.replica.run()
    segment = r.segment()
    versions = segment.policy_version[segment.sampled]
    assert sorted(set(versions.tolist())) == [1, 2, 3, 4]
    assert (np.diff(versions) >= 0).all()
    assert segment.context_version.tolist() == segment.policy_version.tolist()
    assert r.experience.results["e"].versions == (1, 2, 3, 4)


async def test_nothing_is_leased_before_the_engine_serves_a_version(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    engine = ScriptedEngine(script=says(0, END))
    async with rig([ticket()], engine, serving=False) as r:
        running = asyncio.create_task(r.replica.run())
        await asyncio.sleep(0.15)
        assert r.state.running == ()
        assert not r.experience.failures
        await engine.install(1)
        await running
    assert r.experience.results["e"].reward == 3.0


async def test_a_complete_run_ends_a_replica_to_which_no_version_comes(
    rig: Callable[..., Any],
) -> None:
    async with rig([], serving=False) as r, asyncio.timeout(FOR_EVER):
        await r.replica.run()


@pytest.mark.parametrize(
    ("do", "failure_class"),
    [
        ("raises", FailureClass.ENVIRONMENT),
        ("mistypes", FailureClass.ENVIRONMENT),
        ("nan", FailureClass.ENVIRONMENT),
        ("refuses", FailureClass.POLICY),
    ],
)
async def test_a_failed_attempt_is_reported_with_its_class_and_never_becomes_a_reward(
    rig: Callable[..., Any], ticket: Callable[..., Ticket], do: str, failure_class: FailureClass
) -> None:
    tickets = [ticket("bad", task={"prompt": "c", "do": do})]
    tickets += [ticket(f"e{i}", task={"prompt": "c", "do": "well"}) for i in range(20)]
    async with rig(tickets, agent="Chosen", retries=1) as r:
        await r.replica.run()
    assert [(attempt, failure.failure_class) for attempt, failure in r.experience.failures] == [
        (Attempt("bad", 1), failure_class),
        (Attempt("bad", 2), failure_class),
    ]
    assert "bad" not in r.experience.results
    innocent = {f"e{i}" for i in range(20)}
    assert {e for e, result in r.experience.results.items() if result.reward == 1.0} == innocent
    assert r.state.counts == {f"failed_{failure_class}": 2, "completed": 20}


async def test_a_policy_failure_gets_the_reward_that_the_recipe_names(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    tickets = [ticket(do, task={"prompt": "c", "do": do}) for do in ("refuses", "raises")]
    async with rig(tickets, agent="Chosen", retries=0, failure_reward=-1.0) as r:
        await r.replica.run()
    result = r.experience.results["refuses"]
    assert (result.reward, result.termination) == (-1.0, Termination.FAILED)
    assert r.segment("refuses").token_ids.tolist() == [4, 0, 2, END]
    assert [attempt.episode_id for attempt, _ in r.experience.failures] == ["raises"]


async def test_a_revoked_attempt_is_stopped_and_its_successor_runs(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    def script(asked: Asked) -> list[int]:
        engine.token_s = FOR_EVER if asked.session == "e-1" else 0.0
        return [0, END]

    engine = ScriptedEngine(script=script)
    async with rig([ticket()], engine, lease_s=0.1) as r:
        r.experience.revoke.add(Attempt("e", 1))
        await r.replica.run()
    assert r.state.counts == {"stopped": 1, "completed": 1}
    assert r.experience.failures == []


AWAY = RemoteError(Kind.UNAVAILABLE, PEER_AWAY, "not reached")


@pytest.mark.parametrize(
    ("refusals", "calls", "ended"),
    [
        pytest.param([], 1, "completed", id="taken"),
        pytest.param([AWAY, AWAY], 2, "completed", id="the-answer-was-lost"),
        pytest.param(
            [RemoteError(Kind.CORRUPT, "PAYLOAD_CORRUPT", "")], 2, "completed", id="sent-again"
        ),
        pytest.param(
            [RemoteError(Kind.PRECONDITION, "STALE_ATTEMPT", "")], 1, "dropped", id="stale"
        ),
        pytest.param(
            [RemoteError(Kind.CONFLICT, "RESULT_CONFLICT", "")], 1, "dropped", id="conflict"
        ),
        pytest.param(
            [RemoteError(Kind.NOT_FOUND, "UNKNOWN_EPISODE", "")], 1, "dropped", id="unknown"
        ),
    ],
)
async def test_a_result_is_repeated_until_the_ledger_has_it_or_does_not_want_it(
    rig: Callable[..., Any],
    ticket: Callable[..., Ticket],
    refusals: list[RemoteError],
    calls: int,
    ended: str,
) -> None:
    async with rig([ticket()]) as r:
        r.experience.refusals.extend(refusals)
        await r.replica.run()
    assert r.experience.complete_calls == calls
    assert r.state.counts == {ended: 1}
    assert list(r.experience.results) == ["e"]


async def test_a_result_that_the_ledger_can_never_take_is_a_failure_of_infrastructure(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    class Refusing(MemoryExperience):
        async def complete(self, attempt: Attempt, result: Result) -> None:
            raise RemoteError(Kind.PRECONDITION, "UNKNOWN_VERSION", "version 1 is not registered")

    async with rig([ticket()], retries=0, ledger=Refusing) as r:
        await r.replica.run()
    ((_, failure),) = r.experience.failures
    assert failure.failure_class is FailureClass.INFRASTRUCTURE
    assert "UNKNOWN_VERSION" in failure.message


async def test_while_the_ledger_takes_nothing_no_more_than_the_slots_is_held(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    hears = asyncio.Event()

    class Deaf(MemoryExperience):
        async def complete(self, attempt: Attempt, result: Result) -> None:
            if not hears.is_set():
                refused.add(attempt)
                assert len(refused) <= 4
                raise AWAY
            await super().complete(attempt, result)

    refused: set[Attempt] = set()
    async with rig([ticket(f"e{i}") for i in range(20)], slots=4, ledger=Deaf) as r:
        running = asyncio.create_task(r.replica.run())
        await asyncio.sleep(0.3)
        assert set(r.state.running) == refused
        hears.set()
        await running
    assert len(r.experience.results) == 20


async def test_another_runs_ledger_ends_the_replica(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    async with rig([ticket()]) as r:
        r.experience.refusals.append(RemoteError(Kind.PRECONDITION, "WRONG_RUN", "not this run"))
        with pytest.RaisesGroup(RemoteError):
            await r.replica.run()


async def test_a_draining_replica_hands_back_what_does_not_end_in_time(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    engine = ScriptedEngine(script=says(0, END), token_s=FOR_EVER)
    async with rig([ticket(f"e{i}") for i in range(6)], engine, slots=4) as r:
        running = asyncio.create_task(r.replica.run())
        await until(lambda: len(r.state.running) == 4)
        await r.replica.drain()
        await running
    assert sorted(a.episode_id for a in r.experience.handed_back) == ["e0", "e1", "e2", "e3"]
    assert r.experience.failures == []
    assert r.engine.sessions == frozenset()


async def test_a_draining_replica_lets_episodes_end_within_the_grace(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    engine = ScriptedEngine(script=says(0, END), token_s=0.02)
    tickets = [ticket(f"e{i}") for i in range(6)]
    async with rig(tickets, engine, slots=4, grace_s=20.0) as r:
        running = asyncio.create_task(r.replica.run())
        await until(lambda: len(r.state.running) == 4)
        await r.replica.drain()
        await running
    assert sorted(r.experience.results) == ["e0", "e1", "e2", "e3"]
    assert r.experience.handed_back == []


async def test_payloads_beyond_the_inline_limit_go_to_the_store(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    engine = ScriptedEngine(script=says(*([0] * 5000), END), max_context=20_000)
    async with rig([ticket(sampling=Sampling(max_tokens=6000))], engine) as r:
        await r.replica.run()
    result = r.experience.results["e"]
    assert result.inline is None
    assert result.payload.size > 65536
    assert r.segment().num_trained == 3 * 5001


async def test_a_payload_that_the_ledger_misses_is_put_again(
    rig: Callable[..., Any], ticket: Callable[..., Ticket], store: FileStore
) -> None:
    class Forgetful(MemoryExperience):
        """Finds nothing of the first payload that it is told of."""

        forgot = False

        async def complete(self, attempt: Attempt, result: Result) -> None:
            if not self.forgot:
                self.forgot = True
                store.delete(result.payload.sha256)
                raise RemoteError(Kind.NOT_FOUND, "PAYLOAD_MISSING", "")
            await super().complete(attempt, result)

    async with rig([ticket()], ledger=Forgetful, inline_bytes=0) as r:
        await r.replica.run()
    result = r.experience.results["e"]
    assert result.inline is None
    assert store.has(result.payload)


async def test_evaluation_episodes_hold_no_trained_token(
    rig: Callable[..., Any], ticket: Callable[..., Ticket]
) -> None:
    tickets = [ticket("sampled", evaluation="sampled"), ticket("greedy", evaluation="greedy")]
    async with rig(tickets) as r:
        await r.replica.run()
    assert [r.segment(name).num_trained for name in ("sampled", "greedy")] == [0, 0]


@pytest.mark.parametrize(
    ("do", "failure_class"),
    [("sleeps", FailureClass.ENVIRONMENT), ("dies", FailureClass.INFRASTRUCTURE)],
)
async def test_episodes_that_did_nothing_wrong_are_handed_back_when_their_worker_ends(
    rig: Callable[..., Any], ticket: Callable[..., Ticket], do: str, failure_class: FailureClass
) -> None:
    tickets = [ticket("bad", task={"prompt": "c", "do": do}, deadline_s=2.0)]
    tickets += [ticket(f"e{i}", task={"prompt": "c", "do": "well"}) for i in range(3)]

    class SlowOnce(ScriptedEngine):
        """Samples nothing for first attempts; the bad agent comes when all others wait."""

        async def generate(
            self, request: GenerationRequest, heard: Heard | None = None
        ) -> Generated:
            if request.session in ("e0-1", "e1-1", "e2-1"):
                waiting.add(request.session)
                await asyncio.sleep(FOR_EVER)
            if request.session == "bad-1":
                await until(lambda: len(waiting) == 3)
            return await super().generate(request, heard)

    waiting: set[str] = set()
    engine = SlowOnce(script=says(0, END))
    async with rig(tickets, engine, agent="Chosen", retries=0) as r:
        await r.replica.run()
    assert {a.episode_id for a in r.experience.handed_back} == {"e0", "e1", "e2"}
    assert [(a.episode_id, f.failure_class) for a, f in r.experience.failures] == [
        ("bad", failure_class)
    ]
    assert {e: result.reward for e, result in r.experience.results.items()} == {
        f"e{i}": 1.0 for i in range(3)
    }


async def test_every_attempt_is_a_trace_of_its_own_with_a_span_for_every_turn(
    rig: Callable[..., Any], ticket: Callable[..., Ticket], monkeypatch: Any
) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    async with rig([ticket("e0"), ticket("e1")]) as r:
        await r.replica.run()
    for episode in ("e0", "e1"):
        _, trace_id, span_id, _ = r.experience.results[episode].traceparent.split("-")
        own = [s for s in spans.get_finished_spans() if f"{s.context.trace_id:032x}" == trace_id]
        (root,) = [span for span in own if span.name == "episode"]
        turns = [span for span in own if span.name == "turn"]
        assert (root.parent, f"{root.context.span_id:016x}") == (None, span_id)
        assert dict(root.attributes or {}) == {
            "treadle.run": "run",
            "treadle.episode": episode,
            "treadle.attempt": 1,
        }
        assert [(t.parent and t.parent.span_id, t.attributes) for t in turns] == [
            (root.context.span_id, {"treadle.version": 1})
        ] * 3


async def test_workers_that_are_killed_again_and_again_lose_no_ticket(
    rig: Callable[..., Any], pools: Callable[[str], Any], ticket: Callable[..., Ticket]
) -> None:
    pool = await pools("Chosen")

    class Killing(ScriptedEngine):
        """Kills the worker whose agent asks for a turn: 30 turns later it is another one."""

        async def generate(
            self, request: GenerationRequest, heard: Heard | None = None
        ) -> Generated:
            asked.append(request.session)
            if len(asked) in (30, 60, 90):
                os.kill(pool._workers[0]._process.pid, signal.SIGKILL)
            return await super().generate(request, heard)

    asked: list[str] = []
    tickets = [ticket(f"e{i}", task={"prompt": "c", "do": "well"}) for i in range(60)]
    engine = Killing(script=says(0, 0, 0, END))
    async with rig(tickets, engine, agent="Chosen", retries=9) as r:
        await r.replica.run()
    assert len(asked) >= 120
    assert {e for e, result in r.experience.results.items() if result.reward == 1.0} == {
        f"e{i}" for i in range(60)
    }
    assert {f.failure_class for _, f in r.experience.failures} <= {FailureClass.INFRASTRUCTURE}
    assert r.engine.sessions == frozenset()
    await until(lambda: pool.free == 16)  # an environment may still be closing


class ClosedExperience(MemoryExperience):
    """Has no ticket until it is open, and counts who asks."""

    open = False
    asked = 0

    async def lease(self, **request: Any) -> Lease:
        self.asked += 1
        assert request["wait_s"] == 0.0  # the bell is live
        return await super().lease(**request) if self.open else Lease((), 10.0, complete=False)


async def run_beside_a_closed_ledger(r: Any, open_it: Callable[[], None]) -> None:
    """Runs to the end of what a ledger has that is opened when the replica waits at the bell."""
    running = asyncio.ensure_future(r.replica.run())
    await until(lambda: r.experience.asked > 0)
    asked = r.experience.asked
    r.experience.open = True
    open_it()
    async with asyncio.timeout(10):
        await running
    assert r.experience.results
    assert asked < 3  # it does not ask again and again


@pytest.mark.parametrize("by", ["a ring", "another version", "the sweep"])
async def test_a_replica_waits_at_a_live_bell_until_asking_again_may_help(
    rig: Callable[..., Any],
    ticket: Callable[..., Ticket],
    monkeypatch: pytest.MonkeyPatch,
    by: str,
) -> None:
    monkeypatch.setattr("treadle_rollout.replica.SWEEP_S", 0.3 if by == "the sweep" else 60.0)
    bell = MemoryDoorbell(run_id="run", hears=[Topic.TICKETS])
    async with rig([ticket()], bell=bell, ledger=ClosedExperience) as r:
        if by == "another version":
            installed = []
            await run_beside_a_closed_ledger(
                r, lambda: installed.append(asyncio.ensure_future(r.engine.install(2)))
            )
        else:
            ring = partial(bell.ring, Topic.TICKETS)
            await run_beside_a_closed_ledger(r, ring if by == "a ring" else lambda: None)
