from pathlib import Path
from typing import Any

import pytest

from treadle_agents import Turn
from treadle_agents.adapters.reasoning_gym import Mixture, Part, ReasoningGymEnv
from treadle_core.errors import InvalidFieldError

pytest.importorskip("reasoning_gym", reason='pip install "treadle-agents[reasoning-gym]"')

PARTS = {
    "chain_sum": Part(weight=3, config={"max_terms": 3}),
    "leg_counting": Part(weight=1),
}


def test_every_task_of_a_mixture_is_scored_by_its_own_data_set(model: Path) -> None:
    source = Mixture(PARTS, size=40, seed=1)
    tasks = [source.read(cursor) for cursor in range(40)]
    names = [task["reasoning_gym"]["task"] for task in tasks]
    assert set(names) == set(PARTS)
    assert names.count("chain_sum") > 20
    assert (source.read(40), source.read(7)) == (None, tasks[7])
    assert Mixture(PARTS, size=40, seed=2).read(7) != tasks[7]
    for task, name in zip(tasks, names, strict=True):
        env = ReasoningGymEnv(model)
        prompt = env.reset(task)
        assert prompt.startswith("<|system|>")
        assert task["prompt"] in prompt
        right = env.step(Turn(prompt, f"so <answer>{task['answer']}</answer><|end|>", task, 1))
        assert (right.reward, right.terminated, right.metrics) == (1, True, {f"score_{name}": 1})
        assert env.step(Turn(prompt, "no idea<|end|>", task, 1)).reward < 1


def test_a_question_may_stand_alone(model: Path) -> None:
    task = Mixture({"chain_sum": Part()}, size=1).read(0)
    assert ReasoningGymEnv(model, system="").reset(task).startswith(f"<|user|>{task['prompt']}")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda model: Mixture({}, 1), "source.parts: expected data sets with weights > 0"),
        (lambda model: Mixture({"sums": Part()}, 1), "source.parts.sums: expected a data set"),
        (
            lambda model: Mixture({"chain_sum": Part(config={"terms": 1})}, 1),
            "source.parts.chain_sum: expected a data set of reasoning-gym",
        ),
        (lambda model: ReasoningGymEnv(model, system="loud"), "agent.system: expected one of"),
    ],
)
def test_what_reasoning_gym_does_not_know_is_told(model: Path, make: Any, says: str) -> None:
    with pytest.raises(InvalidFieldError, match=says):
        make(model)
