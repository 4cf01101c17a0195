import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_agents.failures import EpisodeError
from treadle_agents.images.placeholders import Shown
from treadle_agents.record import Generated
from treadle_core.episodes import FailureClass, Termination
from treadle_rollout.ports import AgentsLostError, Job
from treadle_runtime.workers.process import WorkerStartError

pytestmark = pytest.mark.processes

END = 1


@dataclass
class Says:
    """A policy that says the same ids at every turn."""

    ids: list[int] = field(default_factory=lambda: [0, 2, END])
    seen: list[list[int]] = field(default_factory=list)

    async def extend(self, observed: Shown) -> Generated:
        self.seen.append(observed.token_ids.tolist())
        await asyncio.sleep(0)
        ids = np.array(self.ids, np.int32)
        ones = np.ones(ids.size, np.int32)
        return Generated(ids, -ones.astype(np.float32), ones, ones, length=False)


def job(do: str = "well", deadline_s: float = 30.0) -> Job:
    return Job({"prompt": "c<end>", "do": do}, max_context=64, max_turns=8, deadline_s=deadline_s)


async def test_an_agent_sees_raw_text_and_the_policy_raw_ids(pool_of: Callable[..., Any]) -> None:
    policy = Says()
    async with pool_of("Counting", turns=3) as pool:
        outcome = await pool.play(job(), policy.extend)
    assert policy.seen == [[4, END], [3], [3]]
    assert (outcome.reward, outcome.termination) == (3.0, Termination.FINISHED)


BAD = [
    ("Chosen", "raises", FailureClass.ENVIRONMENT, r"ValueError: no such tool; token=\*\*\*"),
    ("Chosen", "refuses", FailureClass.POLICY, "not a call"),
    ("Chosen", "exits", FailureClass.ENVIRONMENT, "SystemExit: 3"),
    ("Chosen", "dies", FailureClass.INFRASTRUCTURE, "exit status 7"),
    ("Chosen", "mistypes", FailureClass.ENVIRONMENT, "agent.result: expected a treadle_agents"),
    ("Chosen", "nan", FailureClass.ENVIRONMENT, "agent.result.reward: expected a number"),
    ("Chosen", "spins", FailureClass.ENVIRONMENT, "hung"),
    ("Chosen", "sleeps", FailureClass.ENVIRONMENT, "hung"),
    ("Chosen", "floods", FailureClass.ENVIRONMENT, "hung"),
    ("ChosenLater", "sleeps", FailureClass.ENVIRONMENT, "hung"),
    ("ChosenLater", "blocks", FailureClass.ENVIRONMENT, "hung"),
    ("ChosenLater", "clings", FailureClass.ENVIRONMENT, "hung"),
    ("ChosenLater", "shrugs", FailureClass.ENVIRONMENT, "hung"),
    ("ChosenLater", "raises", FailureClass.ENVIRONMENT, "StopIteration"),
]


async def test_a_bad_agent_fails_its_episode_with_its_class_and_the_pool_goes_on(
    pool_of: Callable[..., Any],
) -> None:
    async def check(agent: str, do: str, failure_class: FailureClass, says: str) -> None:
        async with pool_of(agent) as pool:
            with pytest.raises(EpisodeError, match=says) as failed:
                await pool.play(job(do, deadline_s=0.5), Says().extend)
            assert failed.value.failure_class is failure_class
            await until(lambda: pool.free == 8)
            assert (await pool.play(job(), Says().extend)).reward == 1.0

    await asyncio.gather(*(check(*bad) for bad in BAD))


async def test_what_an_agent_started_ends_with_its_worker(
    pool_of: Callable[..., Any], tmp_path: Path
) -> None:
    async with pool_of("Chosen") as pool:
        with pytest.raises(EpisodeError, match="hung"):
            await pool.play(job("leaves_a_child", deadline_s=0.3), Says().extend)
        child = int((tmp_path / "logs" / "agents-0.log").read_text().split()[1])
        await until(lambda: gone(child))


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        ("NoSuch", "has no 'NoSuch'"),
        ("NoEnv", "agent: expected a treadle_agents.Env or a treadle_agents.ChatAgent, got"),
        ("BadConstructor", "OSError: no display"),
    ],
)
async def test_an_agent_that_cannot_be_made_is_refused_at_the_start(
    pool_of: Callable[..., Any], agent: str, says: str
) -> None:
    with pytest.raises(WorkerStartError, match=says):
        async with pool_of(agent):
            pass


async def test_a_hung_close_costs_no_result(pool_of: Callable[..., Any]) -> None:
    async with pool_of("HangsWhenClosed", places=2) as pool:
        assert (await pool.play(job(), Says().extend)).reward == 1.0
        assert pool.free == 1


async def test_a_slow_environment_blocks_nobody(pool_of: Callable[..., Any]) -> None:
    async with pool_of("Chosen", places=4) as pool:
        slow = [asyncio.create_task(pool.play(job("sleeps"), Says().extend)) for _ in range(3)]
        assert (await pool.play(job(), Says().extend)).reward == 1.0
        for task in slow:
            task.cancel()
        await asyncio.wait(slow)


async def test_episodes_on_a_killed_worker_are_handed_back_unless_their_agent_was_at_work(
    pool_of: Callable[..., Any],
) -> None:
    thinking, at_work = asyncio.Event(), asyncio.Event()

    async def thinks(observed: Shown) -> Generated:
        thinking.set()
        await at_work.wait()
        return await Says().extend(observed)

    async def answers(observed: Shown) -> Generated:
        return await Says().extend(observed)

    async with pool_of("Chosen", places=2) as pool:
        innocent = asyncio.create_task(pool.play(job(), thinks))
        suspect = asyncio.create_task(pool.play(job("sleeps"), answers))
        await thinking.wait()
        (worker,) = pool._workers
        place = worker._places[1]
        await until(lambda: not place.sampling and place.inbox.empty())
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(EpisodeError, match="exit status -9") as failed:
            await suspect
        assert failed.value.failure_class is FailureClass.INFRASTRUCTURE
        at_work.set()
        with pytest.raises(AgentsLostError):
            await innocent


async def test_a_stopped_worker_is_replaced_when_a_deadline_passes(
    pool_of: Callable[..., Any],
) -> None:
    async with pool_of("Chosen") as pool:
        os.kill(pool._workers[0]._process.pid, signal.SIGSTOP)
        with pytest.raises(EpisodeError, match="hung"):
            await pool.play(job(deadline_s=0.3), Says().extend)
        await until(lambda: pool.free == 8)
        assert (await pool.play(job(), Says().extend)).reward == 1.0


async def test_what_the_policy_side_raises_reaches_the_caller_and_frees_the_place(
    pool_of: Callable[..., Any],
) -> None:
    async def fails(observed: np.ndarray) -> Generated:
        raise TimeoutError("the engine's, not ours")

    async with pool_of("Chosen", places=1) as pool:
        with pytest.raises(TimeoutError, match="not ours"):
            await pool.play(job(), fails)
        await until(lambda: pool.free == 1)
        assert (await pool.play(job(), Says().extend)).reward == 1.0


async def test_a_deadline_that_passes_while_the_policy_samples_is_not_the_agents_fault(
    pool_of: Callable[..., Any],
) -> None:
    async def never(observed: np.ndarray) -> Generated:
        await asyncio.Event().wait()
        raise AssertionError

    async with pool_of("Chosen") as pool:
        with pytest.raises(EpisodeError, match="while the policy sampled") as failed:
            await pool.play(job(deadline_s=0.2), never)
        await until(lambda: pool.free == 8)
    assert failed.value.failure_class is FailureClass.INFRASTRUCTURE


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110, what is waited for has no event
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
