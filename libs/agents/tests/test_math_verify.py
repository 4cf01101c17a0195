"""Grader `math_verify`: equal in mathematics, within bounded time."""

import os
import signal

import pytest

from treadle_agents.grading import math_verify
from treadle_agents.grading.math_verify import ComparisonLostError, MathVerify
from treadle_core.errors import InvalidFieldError

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("answer", "right", "reward"),
    [
        pytest.param("so it is $\\boxed{\\frac{1}{2}}$", "0.5", 1, id="boxed-fraction"),
        pytest.param("The answer is 7.", "\\frac{14}{2}", 1, id="plain-against-latex"),
        pytest.param("$x = \\sqrt{8}$", "$2\\sqrt{2}$", 1, id="roots"),
        pytest.param("$\\boxed{(1,2)}$", "(1,2)", 1, id="a-point"),
        pytest.param("$\\boxed{(2,1)}$", "(1,2)", 0, id="another-point"),
        pytest.param("42", 42, 1, id="a-number-of-a-task"),
        pytest.param("43", 42, 0, id="another-number"),
        pytest.param("I do not know", "3", 0, id="no-answer"),
        pytest.param("", "3", 0, id="nothing"),
    ],
)
def test_what_an_answer_is_worth(answer: str, right: object, reward: float) -> None:
    assert MathVerify()(answer, {"answer": right}) == reward


def test_an_answer_that_cannot_be_computed_in_time_is_worth_nothing_and_the_next_is_compared() -> (
    None
):
    assert MathVerify(seconds=1)("$9^{9^{9^{9}}}$", {"answer": "3"}) == 0
    assert MathVerify()("3", {"answer": "3"}) == 1


def test_a_comparison_that_is_killed_is_no_wrong_answer() -> None:
    assert MathVerify()("3", {"answer": "3"}) == 1
    process = math_verify._COMPARING._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ComparisonLostError):
        MathVerify(seconds=0.01)("3", {"answer": "3"})
    assert MathVerify()("3", {"answer": "3"}) == 1
    assert math_verify._COMPARING._process is not process


def test_a_task_without_mathematics_is_no_wrong_answer() -> None:
    with pytest.raises(KeyError, match=r"task\.answer"):
        MathVerify()("3", {"prompt": "?"})
    with pytest.raises(InvalidFieldError, match=r"task\.answer: expected mathematics"):
        MathVerify()("3", {"answer": ""})


def test_the_comparing_process_is_one_for_all() -> None:
    assert MathVerify()("3", {"answer": "3"}) == 1
    first = math_verify._COMPARING._process
    assert MathVerify(field="right")("3", {"right": "3"}) == 1
    assert math_verify._COMPARING._process is first
    assert first is not None
    assert first.pid != os.getpid()
