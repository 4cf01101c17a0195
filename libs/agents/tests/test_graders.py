from decimal import Decimal

import pytest

from treadle_agents.graders import Exact, Number, ReasoningGym, Regex, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("is 42.", "42"),
        ("1, 2 and 3", "3"),
        ("#### 1,234.50", "1234.5"),
        ("10-3 = -7", "-7"),
        ("$.5", "0.5"),
        ("0042", "42"),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    ("grader", "answer", "reward"),
    [
        pytest.param(Exact(), " 42\n", 1, id="exact"),
        pytest.param(Exact(), "42.0", 0, id="not-exact"),
        pytest.param(Number(), "so it is 42.0", 1, id="number"),
        pytest.param(Number(), "42, no: 43", 0, id="another-number"),
        pytest.param(Number(), "dunno", 0, id="no-number"),
        pytest.param(Number(field="solution"), "42", 1, id="number-at-the-end-of-a-solution"),
        pytest.param(Regex(r"^\d+$"), "17", 1, id="pattern"),
        pytest.param(Regex(r"^\d+$"), "x", 0, id="no-match"),
        pytest.param(Regex(r"<a>(?P<answer>.*)</a>"), "<a>42</a>", 1, id="answer-in-pattern"),
        pytest.param(Regex(r"<a>(?P<answer>.*)</a>"), "<a>43</a>", 0, id="another-in-pattern"),
    ],
)
def test_what_an_answer_is_worth(grader, answer: str, reward: float) -> None:
    assert grader(answer, {"answer": 42, "solution": "6 * 7 = 42\n#### 42"}) == reward


def test_a_task_without_the_field_is_no_wrong_answer() -> None:
    with pytest.raises(KeyError, match=r"task\.answer.*prompt, solution"):
        Number()("42", {"prompt": "?", "solution": "42"})


def test_a_task_whose_answer_is_no_number_is_no_wrong_answer() -> None:
    with pytest.raises(ValueError, match=r"task\.answer"):
        Number()("42", {"answer": "many"})


def test_a_pattern_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="pattern"):
        Regex("(")


def test_reasoning_gym_scores_its_own_tasks_by_its_own_rules() -> None:
    pytest.importorskip("reasoning_gym")
    made = {"task": "chain_sum", "size": 10, "seed": 1, "config": {}, "index": 0}
    task = {"reasoning_gym": made}
    assert ReasoningGym()("<answer>-4</answer>", task) == 1
    assert ReasoningGym()("-4", task) == 1
    assert ReasoningGym()("5", task) < 1
