"""Run with `pytest`: the grader and the agent, without a policy and without a service."""

from pathlib import Path

import pytest
from agent import Guessing
from grader import grade

from treadle_agents import Result, Turn

START = Path(__file__).parent / "start"  # has the chat markup of the policy
TASK = {"prompt": "1-7?", "answer": 5}


def step(agent: Guessing, guess: str, number: int = 1) -> Result:
    return agent.step(Turn("", f"{guess}<|end|>", TASK, number))


@pytest.mark.parametrize(("answer", "reward"), [("5", 1), ("4", 0), ("", 0), ("five", 0)])
def test_only_the_number_is_worth_something(answer: str, reward: float) -> None:
    assert grade(answer, TASK) == reward


def test_a_game_begins_with_the_prompt_of_the_task() -> None:
    assert Guessing(START).reset(TASK) == "<|user|>1-7?<|end|><|assistant|>"


def test_a_wrong_guess_is_answered_with_a_hint() -> None:
    agent = Guessing(START)
    assert step(agent, "2").observation == "<|user|>more<|end|><|assistant|>"
    assert step(agent, "7", 2).observation == "<|user|>less<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("guess", "number", "reward"),
    [
        pytest.param("5", 1, 1, id="right"),
        pytest.param("4", 3, 0, id="one-guess-too-many"),
        pytest.param("x", 1, 0, id="no-number"),
    ],
)
def test_a_game_ends_with_a_reward(guess: str, number: int, reward: float) -> None:
    result = step(Guessing(START), guess, number)
    assert (result.terminated, result.reward) == (True, reward)
