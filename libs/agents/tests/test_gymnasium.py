from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle_agents import Turn
from treadle_agents.adapters.gymnasium import GymnasiumEnv
from treadle_agents.adapters.seeds import Seeds
from treadle_agents.loop import Limits, Words, run_episode
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling

gymnasium = pytest.importorskip("gymnasium", reason='pip install "treadle-agents[gymnasium]"')

LAKE: dict[str, Any] = {
    "environment": "FrozenLake-v1",
    "parameters": {"is_slippery": False, "render_mode": "ansi"},
    "actions": ["left", "down", "right", "up"],
}


class Echo(gymnasium.Env):
    """Wants back what it said."""

    observation_space = gymnasium.spaces.Text(16)
    action_space = gymnasium.spaces.Text(16)

    def reset(self, *, seed=None, options=None):
        return f"say{(options or {}).get('word', seed)}", {}

    def step(self, action):
        return "bye", float(action == "say7"), True, False, {}


class Pair(Echo):
    observation_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(9)})
    action_space = gymnasium.spaces.MultiDiscrete([3, 3])

    def reset(self, *, seed=None, options=None):
        return {"a": 4}, {}

    def step(self, action):
        return {"a": 5}, float(sum(action)), False, True, {}


class PairEnv(GymnasiumEnv):
    def render(self, observation):
        return f"a is {observation['a']}"

    def parse(self, answer):
        return np.array([int(word) for word in answer.split()])


gymnasium.register("Echo-v0", entry_point=Echo)
gymnasium.register("Pair-v0", entry_point=Pair)


def turn(action: str) -> Turn:
    return Turn("", f"{action}<|end|>", {}, 1)


@pytest.mark.parametrize(
    ("answer", "square"),
    [
        pytest.param("right", 1, id="name"),
        pytest.param("Not down but RIGHT.", 1, id="last-name-in-either-case"),
        pytest.param("right, and no downwards setup", 1, id="whole-words"),
    ],
)
def test_an_action_is_the_last_name_that_is_said(model: Path, answer: str, square: int) -> None:
    env = GymnasiumEnv(model, **LAKE)
    prompt = env.reset({"seed": 3, "prompt": "Reach G."})
    result = env.step(turn(answer))
    assert prompt.startswith("<|user|>Reach G.\n\n")
    assert "FHFH" in prompt
    assert prompt.endswith("Answer with one of: left, down, right, up.<|end|><|assistant|>")
    assert env.environment.unwrapped.s == square
    assert (result.reward, result.terminated, result.truncated) == (0, False, False)
    assert result.observation.startswith("<|user|>")
    assert result.observation.endswith("<|assistant|>")
    env.close()


@pytest.mark.parametrize(
    ("answer", "square"),
    [
        pytest.param("1 or 2? I say 2", 1, id="last-number"),
        pytest.param("7", None, id="outside"),
        pytest.param("-1", None, id="negative"),
        pytest.param("east", None, id="none"),
    ],
)
def test_without_names_an_action_is_the_last_number_within_the_space(
    model: Path, answer: str, square: int | None
) -> None:
    env = GymnasiumEnv(model, "FrozenLake-v1", {"is_slippery": False}, unreadable=-0.5)
    prompt = env.reset({"seed": 3})
    result = env.step(turn(answer))
    assert prompt == "<|user|>0\n\nAnswer with a number from 0 to 3.<|end|><|assistant|>"
    if square is None:
        assert (result.reward, result.terminated) == (-0.5, False)
        assert result.metrics == {"unreadable": 1}
        assert "Answer with a number from 0 to 3." in result.observation
    else:
        assert result.observation == f"<|user|>{square}<|end|><|assistant|>"
    env.close()


def test_a_name_that_begins_with_another_is_found_whole(model: Path) -> None:
    env = GymnasiumEnv(model, **LAKE | {"actions": ["go", "go on", "stay", "stop"]})
    env.reset({"seed": 3})
    env.step(turn("I go on"))
    assert env.environment.unwrapped.s == 4
    env.close()


async def test_an_episode_is_played_to_its_end_and_recorded(model: Path, speaking: Any) -> None:
    env = GymnasiumEnv(model, **LAKE)
    way = ["down", "down", "right", "right", "down", "right"]
    episode = await run_episode(
        env,
        {"seed": 1},
        generate=speaking([f"{word}<|end|>" for word in way]),
        words=Words(lambda text: list(text.encode()), lambda ids: bytes(ids).decode()),
        sampling=Sampling(temperature=1.0, max_tokens=64),
        limits=Limits(max_context=4096, max_turns=20),
    )
    assert (episode.reward, episode.turn_rewards) == (1.0, (0, 0, 0, 0, 0, 1))
    (segment,) = episode.segments
    said = bytes(segment.token_ids[segment.trained].tolist()).decode()
    assert said == "".join(f"{word}<|end|>" for word in way)


def test_text_is_said_and_answered_as_it_is(model: Path) -> None:
    env = GymnasiumEnv(model, "Echo-v0")
    assert env.reset({"options": {"word": 7}}) == "<|user|>say7<|end|><|assistant|>"
    assert env.step(turn(" say7\n")).reward == 1
    assert env.step(turn("what is more than sixteen")).metrics == {"unreadable": 1}


def test_other_spaces_are_said_by_a_class_of_the_user(model: Path) -> None:
    env = PairEnv(model, "Pair-v0", system="Add.")
    assert env.reset({}) == "<|system|>Add.<|end|><|user|>a is 4<|end|><|assistant|>"
    result = env.step(turn("2 1"))
    assert (result.reward, result.truncated, result.observation) == (3, True, "")
    assert env.step(turn("two")).terminated is False


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"environment": "Nowhere-v0"}, "agent.environment: expected an environment of gymnasium"),
        ({"environment": "Pair-v0"}, "or a class with `render`, got Dict"),
        ({**LAKE, "actions": ["left"]}, "agent.actions: expected 4 different names, got left"),
    ],
)
def test_what_cannot_be_played_in_text_is_refused(model: Path, told: Any, says: str) -> None:
    with pytest.raises(InvalidFieldError, match=says):
        GymnasiumEnv(model, **told)


def test_actions_that_text_cannot_name_are_refused(model: Path) -> None:
    class Shown(GymnasiumEnv):
        def render(self, observation):
            return ""

    with pytest.raises(InvalidFieldError, match="or a class with `parse`, got MultiDiscrete"):
        Shown(model, "Pair-v0")


def test_seeds_are_tasks() -> None:
    source = Seeds(size=2, first=10, prompt="Go.")
    assert [source.read(0), source.read(1), source.read(2)] == [
        {"seed": 10, "prompt": "Go."},
        {"seed": 11, "prompt": "Go."},
        None,
    ]
    assert Seeds(1).read(0) == {"seed": 0}
