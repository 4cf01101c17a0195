"""The calculator as an environment: one operation a call, and only the final answer is worth it."""

import re
import time
from typing import Final

from treadle_agents import Env, Result, Turn

MAX_CALLS: Final = 6
"""One more ends the episode without a reward."""
MAX_SHOWN: Final = 9999
"""Largest magnitude that the calculator shows; beyond it says `error`."""

CALL = re.compile(r"<call>(-?\d{1,6})([+-]\d{1,6})<\|end\|>")
ANSWER = re.compile(r"<answer>(-?\d{1,6})<\|end\|>")


class CalculatorEnv(Env):
    """Shows the policy the results of its calls until it answers.

    The reward is 1 for the exact answer and 0 for any other, for a turn that is neither call nor
    answer, and for one call too many. There is none for calling, or for the form of a turn.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        """`latency_s`: how long a call takes, as one to a tool elsewhere would."""
        self._latency_s = latency_s
        self._calls = 0

    def step(self, turn: Turn) -> Result:
        if answer := ANSWER.fullmatch(turn.action):
            return self._end(correct=answer[1] == str(turn.task["answer"]))
        call = CALL.fullmatch(turn.action)
        if call is None or self._calls == MAX_CALLS:
            return self._end(correct=False)
        self._calls += 1
        time.sleep(self._latency_s)
        return Result(observation=f"<|tool|>{shown(call)}<|end|><|assistant|>")

    def _end(self, *, correct: bool) -> Result:
        return Result(reward=float(correct), terminated=True, metrics={"calls": float(self._calls)})


def shown(call: re.Match[str]) -> str:
    """What the calculator shows for a call."""
    result = int(call[1]) + int(call[2])
    return str(result) if abs(result) <= MAX_SHOWN else "error"
