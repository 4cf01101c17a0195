"""What an agent author imports: agents of both kinds, their results, and `PolicyError`."""

from treadle_agents.chat_agent import ChatAgent, ChatContext, External
from treadle_agents.env import Env, Observation, PolicyError, Result, Turn

__all__ = [
    "ChatAgent",
    "ChatContext",
    "Env",
    "External",
    "Observation",
    "PolicyError",
    "Result",
    "Turn",
]
