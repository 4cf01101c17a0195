"""What an agent author imports: agents of both kinds, their results, and `PolicyError`."""

from treadle_agents.chat_agent import ChatAgent, ChatContext, External
from treadle_agents.env import Env, PolicyError, Result, Turn

__all__ = ["ChatAgent", "ChatContext", "Env", "External", "PolicyError", "Result", "Turn"]
