"""The processes behind the arms of the bench, each told apart by its first argument.

* engine: speaks Chat Completions itself, JSON and streamed, at the pace of the script; and, for a
  peer that asks so, tokens in and out.
* passthrough: hands every request on to an engine and every byte back, and knows nothing of them.
* floor: reads a body, and does with it what no gateway that understands it can leave out: parses
  it as the wire does and hashes every message. Answers at once.
* replica: a policy with the pace of the script, and a gateway with one worker in front of it.
* prober: asks a port for `/health` every so often, and says how long each answer took.

Each says on one line of JSON where it is; `replica` and `prober` then answer orders line by line.
"""

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web
from script import TOKENS, answer_to, paced
from tokenizers import Tokenizer

from treadle_agents.record import Generated
from treadle_core.tickets import Sampling
from treadle_gateway.capture.keys import meaning_of
from treadle_gateway.policy_calls import Heard
from treadle_gateway.pool import GatewayPool
from treadle_gateway.ports import Prompt
from treadle_gateway.settings import GatewaySettings, Limits
from treadle_gateway.terms import SessionSpec
from treadle_gateway.testing import MARKUP, MODEL, write_model
from treadle_gateway.wires.body import parsed
from treadle_gateway.wires.chat import Chat

AT_ONCE = "at-once"
"""Second argument of a policy that keeps no pace."""
MAX_CONTEXT = 131072
PROBE_S = 0.02
_LOGPROBS = np.array([-0.01 * (number + 1) for number in range(TOKENS)], np.float32)
"""Of the tokens of every reply."""
_LOGPROB_OF = list(_LOGPROBS[:, None])
_ZERO = np.zeros(1, np.int32)
_TAIL = 96
"""Tokens at the end of a prompt in which its name stands."""
_BODY = 64 * 1024 * 1024

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Order = Callable[[dict[str, Any]], Awaitable[Any]]


def say(value: Any) -> None:
    """A line to whoever started this process."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def obey(order: Order) -> None:
    """Answers orders until there are no more."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        say(await order(json.loads(line)))


async def serve(handler: Handler) -> None:
    """Answers posts to any path, until stdin ends."""
    application = web.Application(client_max_size=_BODY)
    application.router.add_post("/{path:.*}", handler)
    runner = web.AppRunner(application, access_log=None, keepalive_timeout=600)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
    await site.start()
    say({"port": runner.addresses[0][1]})
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


class Engine:
    """An engine that speaks Chat Completions itself, and vLLM's `/inference/v1/generate`."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once
        with tempfile.TemporaryDirectory(prefix="treadle-engine-") as directory:
            self._tokenizer = write_model(Path(directory))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if request.path == "/inference/v1/generate":
            return await self._generate(body)
        text = answer_to(body["messages"][-1]["content"])
        head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
        if not body.get("stream"):
            async for _ in paced(at_once=self._at_once):
                pass
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
            said = {**head, "object": "chat.completion", "choices": [choice], "usage": _USAGE}
            return web.Response(body=json.dumps(said), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for number in paced(at_once=self._at_once):
            last = number == TOKENS - 1
            delta = {} if last else {"content": text[number]}
            finish = "stop" if last else None
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            chunk = {**head, "object": "chat.completion.chunk", "choices": [choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _generate(self, body: dict[str, Any]) -> web.StreamResponse:
        """Tokens in, tokens and log-probabilities out."""
        ids = answer_ids(self._tokenizer, body["token_ids"])
        async for _ in paced(at_once=self._at_once):
            pass
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(ids, _LOGPROBS.tolist(), strict=True)
        ]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}}
        said = {"choices": [{**choice, "finish_reason": "stop"}]}
        return web.Response(body=json.dumps(said), content_type="application/json")


def answer_ids(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """What the policy says to a prompt, in tokens."""
    tail = tokenizer.decode(list(prompt[-_TAIL:]), skip_special_tokens=False)
    end: Any = tokenizer.token_to_id(MARKUP[2])
    return [*tokenizer.encode(answer_to(tail)).ids, end]


_USAGE = {"prompt_tokens": 100, "completion_tokens": TOKENS, "total_tokens": 100 + TOKENS}


class PassThrough:
    """Hands on what comes, and back what comes back."""

    def __init__(self, http: aiohttp.ClientSession, engine: str) -> None:
        self._http = http
        self._engine = engine

    async def handle(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        headers = {"Content-Type": "application/json"}
        async with self._http.post(self._engine, data=data, headers=headers) as answer:
            if answer.content_type != "text/event-stream":
                body = await answer.read()
                return web.Response(body=body, content_type=answer.content_type)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response


async def floor(request: web.Request) -> web.StreamResponse:
    """Reads, parses and hashes."""
    body = parsed(await request.read())
    ask = Chat().ask(body, {name.lower(): value for name, value in request.headers.items()})
    for message in ask.messages:
        meaning_of(message, frozenset())
    message = {"role": "assistant", "content": answer_to(ask.messages[-1].text)}
    return web.json_response({"choices": [{"message": message}]})


def digest_of(text: str) -> str:
    """Stands for a text."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


class Replica:
    """A policy with a gateway in front of it."""

    def __init__(self, folder: Path, *, at_once: bool) -> None:
        self._at_once = at_once
        self._tokenizer: Tokenizer = write_model(folder / "model")
        settings = GatewaySettings(
            model_folder=folder / "model",
            model_name=MODEL,
            max_context=MAX_CONTEXT,
            log=folder / "gateway.log",
            limits=Limits(requests=4096),
        )
        self.pool = GatewayPool(settings, 1, self.generate)

    async def generate(self, prompt: Prompt, heard: Heard) -> None:
        """A token a piece."""
        ids = answer_ids(self._tokenizer, prompt.token_ids[-_TAIL:].tolist())
        tokens = list(np.array(ids, np.int32)[:, None])
        async for number in paced(at_once=self._at_once):
            logprob = _LOGPROB_OF[number]
            heard(Generated(tokens[number], logprob, _ZERO, _ZERO, length=False))

    async def order(self, order: dict[str, Any]) -> Any:
        """Opens so many sessions, or ends some and says what came of them."""
        if "open" in order:
            spec = SessionSpec(Sampling(temperature=1.0, max_tokens=512), deadline_s=3600.0)
            opened = [await self.pool.open(spec) for _ in range(order["open"])]
            return [[each.session, each.token, each.urls["openai"]] for each in opened]
        return [await self._captured(session) for session in order["end"]]

    async def _captured(self, session: str) -> list[dict[str, Any]]:
        captured = await self.pool.end(session)
        return [
            {
                "text": digest_of(self._decode(segment.token_ids)),
                "sampled": digest_of(self._decode(segment.token_ids[segment.sampled])),
                "trained": int(segment.trained.sum()),
                "logprobs": round(float(segment.logprobs.sum()), 2),
            }
            for segment in captured.segments
        ]

    def _decode(self, ids: Any) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def _only_child() -> int:
    """The worker's process."""
    threads = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    (child,) = "".join(thread.read_text(encoding="utf-8") for thread in threads).split()
    return int(child)


async def replica(*, at_once: bool) -> None:
    """Serves until there are no more orders."""
    with tempfile.TemporaryDirectory(prefix="treadle-gateway-") as directory:
        served = Replica(Path(directory), at_once=at_once)
        await served.pool.start()
        running = asyncio.create_task(served.pool.run())
        port = int(served.pool.urls[0].rpartition(":")[2])
        say({"worker": _only_child(), "port": port, "model": str(Path(directory) / "model")})
        await obey(served.order)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


class Prober:
    """Asks for `/health` every PROBE_S seconds; an answer that is late stands for all it delays."""

    def __init__(self) -> None:
        self._asking = False
        self._late_s: list[float] = []

    async def order(self, order: dict[str, Any]) -> Any:
        """Begins to ask a port, or ends and tells how long each answer took, in seconds."""
        if "begin" in order:
            self._asking, self._late_s = True, []
            self._thread = threading.Thread(target=self._ask, args=(order["begin"],))
            self._thread.start()
            return None
        self._asking = False
        self._thread.join()
        return self._late_s

    def _ask(self, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as line:
            while self._asking:
                start = time.monotonic()
                line.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                answer = b""
                while not answer.endswith(b"}"):
                    answer += line.recv(4096)
                took_s = time.monotonic() - start
                # Also for the probes that would have been sent meanwhile.
                for probe in range(int(took_s / PROBE_S) + 1):
                    self._late_s.append(took_s - probe * PROBE_S)
                time.sleep(max(0.0, PROBE_S - took_s))


async def prober() -> None:
    """Probes as it is told to."""
    say({})
    await obey(Prober().order)


async def main(kind: str, *told: str) -> None:
    """Is one of them."""
    at_once = AT_ONCE in told
    if kind == "engine":
        await serve(Engine(at_once=at_once).handle)
    elif kind == "passthrough":
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            await serve(PassThrough(http, told[0]).handle)
    elif kind == "floor":
        await serve(floor)
    elif kind == "replica":
        await replica(at_once=at_once)
    else:
        await prober()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
