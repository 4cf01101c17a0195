"""What an agent author imports: `Env`, its `Turn` and `Result`, and `PolicyError`."""

from treadle_agents.env import Env, PolicyError, Result, Turn

__all__ = ["Env", "PolicyError", "Result", "Turn"]
