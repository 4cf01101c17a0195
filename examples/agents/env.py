"""An Env in a few lines: Treadle asks the policy, and this says what its words lead to."""

import re

from treadle_agents import Env, Result, Turn

CALL = re.compile(r"<call>(-?\d+)([+-]\d+)<\|end\|>")


class Sums(Env):
    """A calculator that the policy calls until it answers; the right answer is worth 1."""

    def step(self, turn: Turn) -> Result:
        if call := CALL.fullmatch(turn.action):
            result = int(call[1]) + int(call[2])
            return Result(observation=f"<|tool|>{result}<|end|><|assistant|>")
        right = turn.action == f"<answer>{turn.task['answer']}<|end|>"
        return Result(reward=float(right), terminated=True)
