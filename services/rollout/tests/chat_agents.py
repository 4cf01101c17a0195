"""Agents that talk to the policy by themselves, and a policy that greets; loaded by path."""

import asyncio
import json
import os
import time
import urllib.request
from typing import Any

import aiohttp

from treadle_agents import ChatAgent, ChatContext, PolicyError, Result
from treadle_rollout.adapters.script import Asked


def greeting(asked: Asked) -> str:
    """A script of engine `scripted`."""
    return "hello<|im_end|>"


def said(context: ChatContext, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """The policy's message, by nothing but HTTP."""
    request = urllib.request.Request(  # noqa: S310, of the gateway
        f"{context.base_url}/chat/completions",
        json.dumps({"model": context.model, "messages": messages} | fields).encode(),
        {"content-type": "application/json", "authorization": f"Bearer {context.api_key}"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
        return json.load(reply)["choices"][0]["message"]


class Talker(ChatAgent):
    """Asks three times, each time with the whole history; plain code in a thread."""

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def run(self, context: ChatContext) -> Result:
        messages = context.messages
        for number in range(self.turns):
            messages.append(said(context, messages))
            messages.append({"role": "user", "content": f"more {number}"})
        words = sum(len(m["content"] or "") for m in messages if m["role"] == "assistant")
        return Result(reward=1.0, truncated=context.label == "cut", metrics={"words": words})


class Streamer(ChatAgent):
    """Streams one reply and does what the task's `do` says."""

    async def run(self, context: ChatContext) -> Result:
        async with aiohttp.ClientSession(
            headers={"authorization": f"Bearer {context.api_key}"}
        ) as client:
            body = {"model": context.model, "messages": context.messages, "stream": True}
            async with client.post(f"{context.base_url}/chat/completions", json=body) as reply:
                reply.raise_for_status()
                first = await reply.content.readline()
                assert first.startswith(b"data:"), first
                await reply.read()
            return await getattr(self, str(context.task.get("do", "well")))(client, context)

    async def well(self, client: aiohttp.ClientSession, context: ChatContext) -> Result:
        return Result(reward=0.5)

    async def says_nothing(self, client: aiohttp.ClientSession, context: ChatContext) -> Result:
        return Result()

    async def refuses(self, client: aiohttp.ClientSession, context: ChatContext) -> Result:
        raise PolicyError("not an answer")

    async def raises(self, client: aiohttp.ClientSession, context: ChatContext) -> Result:
        raise ValueError("no such tool")

    async def mistypes(self, client: aiohttp.ClientSession, context: ChatContext) -> Any:
        return 1.0

    async def hangs(self, client: aiohttp.ClientSession, context: ChatContext) -> Result:
        await asyncio.sleep(3600)
        return Result()

    async def reports(self, client: aiohttp.ClientSession, context: ChatContext) -> Result:
        end = f"{context.base_url.split('/s/')[0]}/sessions/{_session(context)}/end"
        body = {"reward": 3.0, "turn_rewards": [3.0], "metrics": {"m": 1.0}}
        async with client.post(end, json=body) as reply:
            reply.raise_for_status()
        return Result()


class Silent(ChatAgent):
    """Never asks the policy."""

    def run(self, context: ChatContext) -> Result:
        return Result(reward=1.0)


class Sleeper(ChatAgent):
    """Blocks its thread for ever."""

    def run(self, context: ChatContext) -> Result:
        said(context, context.messages)
        time.sleep(3600)
        return Result()


class Leaver(ChatAgent):
    """Ends its whole process."""

    def run(self, context: ChatContext) -> Result:
        os._exit(7)


def _session(context: ChatContext) -> str:
    return context.base_url.split("/s/")[1].split("/")[0]
