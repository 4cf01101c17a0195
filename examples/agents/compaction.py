"""A conversation that writes its history anew when it nears the limit, and goes on from there.

The gateway sees that what comes is not what was said: a second path begins, and both are trained,
each on the history that the policy really saw.
"""

import re
from typing import Any

from aiohttp import ClientSession

from treadle_agents import ChatAgent, ChatContext, Result

CALL = re.compile(r"<call>(-?\d+)([+-]\d+)")
FULL = 0.4
"""Share of the context behind which the history is compacted."""


class Compacting(ChatAgent):
    """The calculator's agent; what is computed already takes the place of its terms."""

    async def run(self, context: ChatContext) -> Result:
        terms = re.findall(r"[+-]?\d+", str(context.task["expression"]))
        messages: list[dict[str, Any]] = [{"role": "user", "content": "".join(terms)}]
        compactions = 0
        headers = {"Authorization": f"Bearer {context.api_key}"}
        async with ClientSession(headers=headers, raise_for_status=True) as client:
            said, used = await _ask(client, context, messages)
            while (call := CALL.fullmatch(said["content"])) and len(terms) > 1:
                result = str(int(call[1]) + int(call[2]))
                terms = [result, *terms[2:]]
                messages += [said, {"role": "tool", "content": result}]
                if used > FULL * context.max_context and len(terms) > 1:
                    messages = [{"role": "user", "content": "".join(terms)}]
                    compactions += 1
                said, used = await _ask(client, context, messages)
        right: bool = said["content"] == f"<answer>{context.task['answer']}"
        return Result(reward=float(right), metrics={"compactions": float(compactions)})


async def _ask(
    client: ClientSession, context: ChatContext, messages: list[dict[str, Any]]
) -> tuple[dict[str, Any], int]:
    """What the policy says, and how many tokens it and its prompt have."""
    body = {"model": context.model, "messages": messages}
    async with client.post(f"{context.base_url}/chat/completions", json=body) as reply:
        whole = await reply.json()
    return whole["choices"][0]["message"], whole["usage"]["total_tokens"]
