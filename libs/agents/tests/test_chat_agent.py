import asyncio
from typing import Any

import pytest

from treadle_agents import ChatAgent, ChatContext, PolicyError, Result
from treadle_agents.failures import EpisodeError
from treadle_agents.loop import close, converse, make
from treadle_core.episodes import FailureClass, Termination
from treadle_core.tickets import Sampling


def context(**task: Any) -> ChatContext:
    return ChatContext(task, "http://h/v1", "http://h", "key", "policy", Sampling(), 100, 5.0)


class Plain(ChatAgent):
    def run(self, context: ChatContext) -> Result:
        return Result(reward=1.5, truncated=context.label == "cut", metrics={"a": 1.0})


class Later(ChatAgent):
    async def run(self, context: ChatContext) -> Any:
        await asyncio.sleep(0)
        if context.prompt == "policy":
            raise PolicyError("not a call")
        if context.prompt == "fault":
            raise ValueError("no such tool")
        return "nonsense"


async def test_an_agent_says_what_its_episode_was_worth() -> None:
    agent = await make(Plain)
    assert isinstance(agent, ChatAgent)
    outcome = await converse(agent, context(prompt="x"))
    assert (outcome.reward, outcome.termination, outcome.metrics) == (
        1.5,
        Termination.FINISHED,
        {"a": 1.0},
    )
    cut = await converse(agent, context(prompt="x", label="cut"))
    assert cut.termination is Termination.TRUNCATED
    await close(agent)


@pytest.mark.parametrize(
    ("prompt", "whose", "says"),
    [
        ("policy", FailureClass.POLICY, "not a call"),
        ("fault", FailureClass.ENVIRONMENT, "ValueError: no such tool"),
        ("other", FailureClass.ENVIRONMENT, "expected a treadle_agents.Result, got str"),
    ],
)
async def test_what_an_agent_raises_has_a_class(
    prompt: str, whose: FailureClass, says: str
) -> None:
    with pytest.raises(EpisodeError, match=says) as caught:
        await converse(Later(), context(prompt=prompt))
    assert caught.value.failure_class is whose


def test_a_context_reads_what_a_task_holds() -> None:
    plain = context(prompt="go", label=4, images=["a.png"])
    assert plain.messages == [{"role": "user", "content": "go"}]
    assert (plain.prompt, plain.label, plain.images, plain.tools) == ("go", 4, ["a.png"], [])
    said = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    chat = context(messages=said, tools=[tool])
    assert (chat.messages, chat.prompt, chat.tools) == (said, "ab", [tool])
    chat.messages.append({"role": "user", "content": "more"})
    assert len(chat.messages) == 3
    with pytest.raises(TypeError, match="task: expected prompt as text"):
        _ = context(question="?").prompt
