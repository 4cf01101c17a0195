"""Two agents that work together on one episode: a planner, and a solver who does its parts.

Each has a conversation of its own in the same session, so that each is a branch of what was said,
and both are trained on the reward that they earned together.
"""

import re
from typing import Any

from aiohttp import ClientSession

from treadle_agents import ChatAgent, ChatContext, Result

PART, ANSWER = re.compile(r"<call>(-?\d+[+-]\d+)"), re.compile(r"<answer>(-?\d+)")
MAX_PARTS = 3


class Conversation:
    """What one of the two has said and was told."""

    def __init__(self, client: ClientSession, context: ChatContext) -> None:
        self._client, self._context = client, context
        self._messages: list[dict[str, Any]] = []

    async def ask(self, role: str, content: str) -> str:
        """What the policy says when `role` says `content`."""
        self._messages.append({"role": role, "content": content})
        body = {"model": self._context.model, "messages": self._messages}
        url = f"{self._context.base_url}/chat/completions"
        async with self._client.post(url, json=body) as reply:
            said: dict[str, Any] = (await reply.json())["choices"][0]["message"]
        self._messages.append(said)
        return said["content"]


class PlannerAndSolver(ChatAgent):
    """The planner takes a sum apart, and the solver, who sees only the parts, does them."""

    async def run(self, context: ChatContext) -> Result:
        headers = {"Authorization": f"Bearer {context.api_key}"}
        async with ClientSession(headers=headers, raise_for_status=True) as client:
            planner, solver = Conversation(client, context), Conversation(client, context)
            said, parts = await planner.ask("user", str(context.task["expression"])), 0
            while (part := PART.fullmatch(said)) and parts < MAX_PARTS:
                solved = ANSWER.fullmatch(await solver.ask("user", part[1]))
                said = await planner.ask("tool", solved[1] if solved else "error")
                parts += 1
        right = said == f"<answer>{context.task['answer']}"
        return Result(reward=float(right), metrics={"parts": float(parts)})
