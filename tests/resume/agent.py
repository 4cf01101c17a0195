"""An agent whose reward depends on nothing but what was said."""

from treadle_agents import Env, Result, Turn


class Parity(Env):
    """Three turns; each is worth 1 where the policy said an odd number of characters."""

    def step(self, turn: Turn) -> Result:
        return Result(
            observation="<|tool|>7<|end|><|assistant|>",
            reward=float(len(turn.action) % 2),
            terminated=turn.number == 3,
        )
