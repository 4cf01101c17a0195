"""The agent `grader`: tasks whose only code is their grader."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from treadle_agents.chat import Chat
from treadle_agents.failures import EpisodeError
from treadle_agents.loop import Limits, Words, close, make, play
from treadle_core.episodes import FailureClass
from treadle_rollout.worker import Turn, agent_of, refusal
from treadle_runtime.plugins import PluginError

POLICY = Path(__file__).parents[3] / "examples" / "calculator" / "policy"
TASK = {"prompt": "6*7", "answer": 42}
GRADERS = """
def right(answer, task): return 1.0
def raises(answer, task): raise ValueError("no such answer")
def text(answer, task): return "1"
def nan(answer, task): return float("nan")
def nothing(answer, task): answer == "1"
number = 3
"""


@pytest.fixture
def graders(tmp_path: Path) -> str:
    (tmp_path / "graders.py").write_text(GRADERS)
    return f"{tmp_path}/graders.py"


def graded(**parameters: Any):
    return agent_of("grader", parameters, POLICY)()


async def outcome(task: dict[str, Any], said: str = "42", **parameters: Any):
    """Plays one episode in which the policy says `said`; characters stand for tokens."""
    words = Words(lambda text: [ord(c) for c in text], lambda ids: "".join(map(chr, ids)))

    async def extend(observed: Any) -> Turn:
        return Turn(np.array([ord(c) for c in said + "<|end|>"], np.int32), False)

    env = await make(lambda: graded(**parameters))
    try:
        return await play(env, task, extend=extend, words=words, limits=Limits(200, 2))
    finally:
        await close(env)


def test_messages_or_a_prompt_are_shown_in_the_policys_own_markup() -> None:
    agent = graded(grader="exact", system="be terse")
    asked = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    assert agent.reset(TASK) == "<|system|>be terse<|end|><|user|>6*7<|end|><|assistant|>"
    assert graded(grader="exact").reset({"messages": asked}).startswith("<|user|>1+1<|end|>")


@pytest.mark.parametrize(
    ("grader", "said", "reward"),
    [
        pytest.param("exact", "42", 1, id="name"),
        pytest.param({"name": "regex", "pattern": "^4"}, "4", 1, id="with-parameters"),
        pytest.param("number", "43", 0, id="wrong"),
    ],
)
async def test_an_answer_ends_the_episode_with_its_grade(grader, said, reward) -> None:
    ended = await outcome(TASK, said, grader=grader)
    assert (ended.reward, ended.turn_rewards) == (reward, (reward,))


async def test_a_function_in_a_file_is_a_grader(graders: str) -> None:
    assert (await outcome(TASK, "x", grader=f"{graders}:right")).reward == 1


@pytest.mark.parametrize(
    ("grader", "told"),
    [
        ("raises", "ValueError: no such answer"),
        ("text", r"agent\.result\.reward"),
        ("nothing", "got None; is a return missing"),
        ("nan", r"agent\.result\.reward: expected a number in .*nan"),
    ],
)
async def test_a_grader_that_fails_is_never_a_reward(graders: str, grader, told) -> None:
    with pytest.raises(EpisodeError, match=told) as failed:
        await outcome(TASK, grader=f"{graders}:{grader}")
    assert failed.value.failure_class is FailureClass.ENVIRONMENT


def test_a_grader_is_tried_on_an_answer_of_nothing(graders: str) -> None:
    graded(grader="exact").check(TASK)
    with pytest.raises(EpisodeError, match=r"agent\.result\.reward"):
        graded(grader=f"{graders}:text").check(TASK)


async def test_a_task_without_a_prompt_says_what_it_has() -> None:
    with pytest.raises(EpisodeError, match=r"messages, or prompt as text, got question.*columns"):
        await outcome({"question": "?"}, grader="exact")


@pytest.mark.parametrize(
    ("grader", "told"),
    [
        pytest.param("exakt", "did you mean exact", id="name"),
        pytest.param({"name": "regex", "patern": "x"}, "did you mean pattern", id="parameter"),
        pytest.param({"name": "regex", "pattern": "("}, "regular expression", id="value"),
        pytest.param("FILE:rihgt", "did you mean right", id="function"),
        pytest.param("FILE:number", "a class or a function", id="neither"),
        pytest.param({"name": "FILE:right", "x": 1}, "a class or a function", id="no-parameters"),
    ],
)
def test_a_grader_that_is_none_is_refused(graders: str, grader: Any, told: str) -> None:
    if isinstance(grader, dict):
        grader = grader | {"name": grader["name"].replace("FILE", graders)}
    else:
        grader = grader.replace("FILE", graders)
    with pytest.raises((PluginError, ValueError), match=told):
        graded(grader=grader)


def test_the_markup_is_what_transformers_makes_of_the_same_folder() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(POLICY, local_files_only=True)
    messages = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2+2"},
    ]
    chat = Chat(POLICY)
    whole = chat.prompt(messages[:1]) + f"2{tokenizer.eos_token}" + chat.reply(messages[2])
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert whole == expected == chat.prompt(messages)


def test_an_agent_that_takes_no_model_is_given_none(tmp_path: Path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text("from treadle_agents import Env\nclass Plain(Env): pass\n")
    assert type(agent_of(f"{agent}:Plain", {}, POLICY)()).__name__ == "Plain"


async def test_why_an_agent_cannot_be_made_is_said_last() -> None:
    with pytest.raises(EpisodeError) as failed:
        await make(lambda: graded(grader="numbr"))

    reason = refusal(failed.value).splitlines()[-1]
    assert reason.startswith("PluginError: no plugin named 'numbr'")
    assert reason.endswith("did you mean number")
    assert refusal(ValueError("x")).splitlines()[-1] == "ValueError: x"
