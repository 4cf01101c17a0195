"""The same task by an agent that owns its loop and talks to the policy over HTTP.

`make demo AGENT=chat` trains it. It would play with any model behind an OpenAI API that speaks this
policy's markup: nothing in it knows that it is trained.
"""

from aiohttp import ClientSession
from env import ANSWER, CALL, MAX_CALLS, shown

from treadle_agents import ChatAgent, ChatContext, Result


class CalculatorChat(ChatAgent):
    """Asks, runs the calculator where the policy calls it, and asks again until it answers."""

    async def run(self, context: ChatContext) -> Result:
        messages = [{"role": "user", "content": context.task["expression"]}]
        headers = {"authorization": f"Bearer {context.api_key}"}
        async with ClientSession(headers=headers, raise_for_status=True) as client:
            for calls in range(MAX_CALLS + 1):
                body = {"model": context.model, "messages": messages}
                async with client.post(f"{context.base_url}/chat/completions", json=body) as reply:
                    choice = (await reply.json())["choices"][0]
                said = choice["message"]["content"]
                whole = said + "<|end|>" if choice["finish_reason"] == "stop" else said
                if answer := ANSWER.fullmatch(whole):
                    reward = float(answer[1] == str(context.task["answer"]))
                    return Result(reward=reward, metrics={"calls": float(calls)})
                if not (call := CALL.fullmatch(whole)):
                    break
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "tool", "content": shown(call)},
                ]
        return Result(reward=0.0, metrics={"calls": float(len(messages) // 2)})
