"""Molt's chat server before the engine of the bench, told what to do line by line.

    PYTHON molt.py ENGINE_URL WHEEL_FOLDER MODEL_FOLDER

It runs the peer's own modules, unchanged, from its unpacked wheel. README.md beside this file says
what they need.
"""

import asyncio
import importlib
import json
import secrets
import socket
import sys
from hashlib import blake2b
from types import SimpleNamespace
from typing import Any

import aiohttp
from transformers import AutoTokenizer

MAX_CONTEXT = 131072


def say(value: Any) -> None:
    """A line to whoever started this process."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main(engine: str, wheel: str, model: str) -> None:
    """Serves, opening and ending sessions as it is told, until there are no more orders."""
    sys.path.insert(0, wheel)
    fastapi, uvicorn = importlib.import_module("fastapi"), importlib.import_module("uvicorn")
    server = importlib.import_module("molt.agents._chat_server")
    router = importlib.import_module("molt.trainer.rollout.router")
    sampling = SimpleNamespace(max_tokens=512, min_tokens=0, temperature=1.0, top_p=1.0, logprobs=1)
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(engine, timeout=timeout, connector=connector) as http:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        client = router.RouterGenerateClient(http)
        state = server.ChatServerState(client, tokenizer, "policy", MAX_CONTEXT, sampling)
        application: Any = fastapi.FastAPI()
        server.mount_session_capture(application, state)
        listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
        serving: Any = uvicorn.Server(uvicorn.Config(application, log_level="warning"))
        running: asyncio.Task[None] = asyncio.create_task(serving.serve([listening]))
        port = listening.getsockname()[1]
        say({"port": port})
        while line := await asyncio.to_thread(sys.stdin.readline):
            say(_obey(state, json.loads(line), port, sampling))
        serving.should_exit = True
        await running


def _obey(state: Any, order: dict[str, Any], port: int, sampling: Any) -> Any:
    """Opens so many sessions, or ends some and says what each captured."""
    if "open" in order:
        names = [secrets.token_hex(8) for _ in range(order["open"])]
        for name in names:
            state.open(name, "", "", None, sampling)
        return [[name, "none", f"http://127.0.0.1:{port}/s/{name}/v1"] for name in names]
    captured = [
        [_captured(state.processor, each) for each in state.sessions[name].trajectories]
        for name in order["end"]
    ]
    for name in order["end"]:
        state.discard(name)
    return captured


def _captured(tokenizer: Any, line: Any) -> dict[str, Any]:
    """As the bench states it of the gateway: what was said, what of it was sampled, its numbers."""
    ids: list[int] = line.observation_tokens
    sampled = [token for start, end in line.action_ranges for token in ids[start:end]]
    return {
        "text": _digest_of(tokenizer.decode(ids)),
        "sampled": _digest_of(tokenizer.decode(sampled)),
        "trained": len(sampled),
        "logprobs": round(sum(line.rollout_log_probs), 2),
    }


def _digest_of(text: str) -> str:
    """As `digest_of` of the bench."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
