import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from treadle_agents.adapters.verifiers import VerifiersAgent, VerifiersTasks
from treadle_agents.failures import EpisodeError
from treadle_core.errors import InvalidFieldError

pytest.importorskip("verifiers.v1", reason='pip install "treadle-agents[verifiers]"')
pytestmark = pytest.mark.processes

PACKAGE = '''
"""Sums as an environment of verifiers, and a harness that asks twice."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Asks", "Sums"]


class Sum(vf.TaskData):
    answer: int


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.answer == 3:
            raise ValueError("the scorer broke")
        return float(str(self.data.answer) in trace.last_reply)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for number in range(4):
            yield SumTask(Sum(prompt=f"{number} + {number}?", answer=2 * number if number else 3))


class Asks(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *_, **__):
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=60) as client:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                reply = await client.post(f"{endpoint}/chat/completions", json=body)
                reply.raise_for_status()
                messages.append(reply.json()["choices"][0]["message"])
                messages.append({"role": "user", "content": "Are you sure?"})
        return ProgramResult(exit_code=0, stdout="", stderr="")
'''
ENVIRONMENT: dict[str, Any] = {
    "taskset": {"id": "sums_of_a_test"},
    "agent": {"harness": {"id": "sums_of_a_test"}, "runtime": {"type": "subprocess"}},
}


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment's package, as if installed."""
    (tmp_path / "sums_of_a_test.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("sums_of_a_test", None)


def test_the_tasks_of_a_task_set_are_counted_and_end() -> None:
    source = VerifiersTasks(ENVIRONMENT)
    assert source.read(2) == {"index": 2, "prompt": "2 + 2?"}
    assert source.read(0) == {"index": 0, "prompt": "0 + 0?"}
    assert source.read(4) is None
    assert json.dumps(source.read(3))


@pytest.mark.parametrize(("said", "reward"), [("It is 4.", 1), ("It is 5.", 0)])
async def test_its_own_loop_plays_and_its_rubric_says_the_worth(
    talk: Any, said: str, reward: float
) -> None:
    talked = await talk(VerifiersAgent(ENVIRONMENT), {"index": 2}, lambda _: said)
    assert talked.outcome.reward == reward
    assert talked.outcome.metrics == {"turns": 2, "length": 8}
    assert len(talked.asked) == 2
    assert "Are you sure?" in talked.asked[1]
    (segment,) = talked.segments
    assert segment.trained.tolist() == segment.sampled.tolist()


async def test_what_cannot_be_scored_is_a_failure_and_no_reward(talk: Any) -> None:
    with pytest.raises(EpisodeError, match="the scorer broke"):
        await talk(VerifiersAgent(ENVIRONMENT), {"index": 0}, lambda _: "3")


async def test_a_task_that_is_not_there_is_told(talk: Any) -> None:
    with pytest.raises(EpisodeError, match=r"task\.index: expected one of the task set, got 9"):
        await talk(VerifiersAgent(ENVIRONMENT), {"index": 9}, lambda _: "3")


def test_a_configuration_that_verifiers_does_not_take_is_refused() -> None:
    with pytest.raises(InvalidFieldError, match="environment: expected what verifiers takes"):
        VerifiersAgent({"taskset": {"id": "no_such_set"}})
