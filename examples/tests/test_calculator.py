import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from treadle_agents import Turn
from treadle_runtime import plugins
from treadle_runtime.plugins import PluginConfig

CALCULATOR = Path(__file__).parents[1] / "calculator"
MANY = range(300)


def build(name: str, **parameters: object):
    config = PluginConfig.model_validate({"name": f"{CALCULATOR / name}", **parameters})
    return plugins.build("treadle.none", config)


def tasks(split: str, **parameters: object):
    return build("tasks.py:CalculatorTasks", split=split, **parameters)


def turn(action: str, answer: int = 85) -> Turn:
    return Turn("", action, {"answer": answer}, 1)


def test_an_answer_is_the_value_of_its_expression() -> None:
    for cursor in MANY:
        task = tasks("train").read(cursor)
        terms = re.findall(r"[+-]?\d+", task["expression"])
        assert task["answer"] == sum(map(int, terms))
        assert 2 <= len(terms) <= 4


def test_the_same_cursor_gives_the_same_task_and_another_seed_another() -> None:
    assert tasks("train").read(7) == tasks("train").read(7)
    assert tasks("train").read(7) != tasks("train", seed=1).read(7)


def test_no_held_out_expression_is_trained_or_demonstrated() -> None:
    held_out = {tasks("heldout").read(cursor)["expression"] for cursor in MANY}
    is_held_out = plugins.load("treadle.none", f"{CALCULATOR / 'tasks.py'}:is_held_out")
    teacher = build("demonstrations.py:CalculatorDemonstrations")
    trained = {tasks("train", seed=1).read(cursor)["expression"] for cursor in MANY}
    shown = {teacher.read(index).pieces[0][0][len("<|user|>") :] for index in MANY}
    shown = {prompt.partition("<")[0] for prompt in shown}
    assert all(map(is_held_out, held_out))
    assert not any(map(is_held_out, trained | shown))


@pytest.mark.parametrize(
    ("action", "reward"),
    [
        pytest.param("<answer>85<|end|>", 1, id="right"),
        pytest.param("<answer>58<|end|>", 0, id="wrong"),
        pytest.param("<answer>085<|end|>", 0, id="not-exact"),
        pytest.param("<answer>85", 0, id="cut-short"),
        pytest.param("<answer>85<|end|><|end|>", 0, id="more-than-an-answer"),
        pytest.param("<answer><|end|>", 0, id="no-answer"),
        pytest.param("<call>47+38+1<|end|>", 0, id="two-operations"),
        pytest.param("<call>47<|end|>", 0, id="no-operation"),
        pytest.param("<|tool|>85<|end|>", 0, id="pretends-to-be-the-tool"),
        pytest.param(f"<answer>{'9' * 5000}<|end|>", 0, id="endless"),
        pytest.param("", 0, id="nothing"),
    ],
)
def test_only_the_exact_answer_is_worth_anything(action: str, reward: float) -> None:
    result = build("env.py:CalculatorEnv").step(turn(action))

    assert (result.reward, result.terminated) == (reward, True)


@pytest.mark.parametrize(
    ("action", "shown"),
    [
        pytest.param("<call>47+38<|end|>", "85", id="sum"),
        pytest.param("<call>-31-69<|end|>", "-100", id="negative"),
        pytest.param("<call>9999+1<|end|>", "error", id="does-not-fit"),
    ],
)
def test_a_call_is_answered_and_earns_nothing(action: str, shown: str) -> None:
    result = build("env.py:CalculatorEnv").step(turn(action))

    assert result.observation == f"<|tool|>{shown}<|end|><|assistant|>"
    assert (result.reward, result.terminated) == (None, False)


def test_one_call_too_many_ends_the_episode() -> None:
    env = build("env.py:CalculatorEnv")
    results = [env.step(turn("<call>1+1<|end|>")) for _ in range(7)]

    assert [result.terminated for result in results] == [False] * 6 + [True]
    assert (results[-1].reward, results[-1].metrics) == (0, {"calls": 6})


def test_every_demonstration_earns_the_reward() -> None:
    teacher = build("demonstrations.py:CalculatorDemonstrations", in_the_head=0.3)
    for index in MANY:
        (prompt, _), *pieces = teacher.read(index).pieces
        expression = prompt.removeprefix("<|user|>").partition("<")[0]
        answer = sum(map(int, re.findall(r"[+-]?\d+", expression)))
        env = build("env.py:CalculatorEnv")
        for said, shown in zip(pieces[:-1:2], pieces[1::2], strict=True):
            assert env.step(turn(said[0], answer)).observation == shown[0]
            assert (said[1], shown[1]) == (True, False)
        assert env.step(turn(pieces[-1][0], answer)).reward == 1


def test_the_expert_answers_in_the_head_as_often_as_told() -> None:
    teacher = build("demonstrations.py:CalculatorDemonstrations", in_the_head=0.6)
    at_once = [len(teacher.read(index).pieces) == 2 for index in range(2000)]

    assert 0.56 < sum(at_once) / len(at_once) < 0.64


def test_the_tokenizer_spells_numbers_and_gives_every_text_back() -> None:
    tokenizer = Tokenizer.from_file(str(CALCULATOR / "tokenizer" / "tokenizer.json"))
    teacher = build("demonstrations.py:CalculatorDemonstrations", in_the_head=0.3)
    for index in MANY:
        pieces = [text for text, _ in teacher.read(index).pieces]
        apart = [
            token
            for text in pieces
            for token in tokenizer.encode(text, add_special_tokens=False).ids
        ]
        whole = tokenizer.encode("".join(pieces), add_special_tokens=False).ids
        assert apart == whole
        assert tokenizer.decode(whole, skip_special_tokens=False) == "".join(pieces)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_the_committed_policy_has_the_committed_tokenizer(name: str) -> None:
    ours = (CALCULATOR / "tokenizer" / name).read_bytes()
    assert (CALCULATOR / "policy" / name).read_bytes() == ours
