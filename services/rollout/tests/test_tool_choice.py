"""What a client wants called, over each wire, from gateway to engine; all real."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from treadle_core.tickets import Sampling
from treadle_gateway.settings import GatewaySettings
from treadle_gateway.terms import SessionSpec
from treadle_gateway.testing import write_model
from treadle_rollout.adapters.gateway_sessions import GatewaySessions
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.conformance.tiny_model import TinyModel, tiny_config
from treadle_rollout.ports import Engine

pytest.importorskip("llguidance")
pytestmark = pytest.mark.processes

PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
SAID = [{"role": "user", "content": "go"}]
FUNCTIONS = [{"name": name, "parameters": PARAMETERS} for name in ("light", "heat")]
CHAT = {
    "messages": SAID,
    "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
RESPONSES = {
    "input": "go",
    "tools": [{"type": "function", **each} for each in FUNCTIONS],
    "tool_choice": {"type": "function", "name": "heat"},
    "parallel_tool_calls": False,
}
MESSAGES = {
    "messages": SAID,
    "max_tokens": 256,
    "tools": [{"name": each["name"], "input_schema": PARAMETERS} for each in FUNCTIONS],
    "tool_choice": {"type": "tool", "name": "light", "disable_parallel_tool_use": True},
}


class Client:
    """A client of one session."""

    def __init__(self, sessions: GatewaySessions, http: aiohttp.ClientSession) -> None:
        self.sessions = sessions
        self._http = http

    async def open(self) -> None:
        spec = SessionSpec(Sampling(max_tokens=256), deadline_s=600.0)
        self.access = await self.sessions.open("episode", spec)

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        url = f"{self.access.urls['anthropic']}/v1/{path}"
        headers = {"authorization": f"Bearer {self.access.token}"}
        body = {"model": "policy", **body}
        async with self._http.post(url, json=body, headers=headers) as reply:
            return reply.status, await reply.json()


@contextlib.asynccontextmanager
async def gateway(engine: Engine, folder: Path) -> AsyncGenerator[Client]:
    settings = GatewaySettings(
        model_folder=folder,
        model_name="policy",
        max_context=engine.max_context,
        log=folder / "gateway.log",
        supported=engine.samplings,
    )
    sessions = GatewaySessions(settings, 1, engine, lambda tokens: None)
    await sessions.start()
    running = asyncio.create_task(sessions.run())
    try:
        async with aiohttp.ClientSession() as http:
            client = Client(sessions, http)
            await client.open()
            yield client
    finally:
        running.cancel()
        await asyncio.wait({running})
        await engine.close()


async def test_what_is_to_be_called_is_called_over_every_wire(tmp_path: Path) -> None:
    tokenizer = write_model(tmp_path)
    config = tiny_config()
    config.vocab_size = tokenizer.get_vocab_size()
    subject = TinyModel(config, tmp_path / "tiny")
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "tiny")
    end = tokenizer.token_to_id("<|im_end|>")
    engine = subject.engine(slots=2, max_context=2048, stop_tokens=(end,))
    engine.arrival[:] = subject.weights(1)
    await engine.install(1)
    async with gateway(engine, tmp_path) as client:
        called = [
            *chat_calls(await client.post("chat/completions", CHAT)),
            *responses_calls(await client.post("responses", RESPONSES)),
            *messages_calls(await client.post("messages", MESSAGES)),
        ]
        captured = await client.sessions.end(client.access.session)
    assert called[0][0] in ("light", "heat")
    assert [name for name, _ in called[1:]] == ["heat", "light"]
    assert all(arguments in ({"on": True}, {"on": False}) for _, arguments in called)
    assert captured.counts["other_sampling.grammar"] == 3
    assert captured.counts["untrained.other_sampling"] == 3
    for segment in captured.segments:
        assert not segment.trained.any()
        free = subject.logprobs(1, segment.token_ids.copy(), 1.0)[segment.sampled[1:]]
        held = segment.logprobs[segment.sampled]
        assert np.all(held >= free - 1e-3)
        assert held.sum() > free.sum() + 1


def chat_calls(answer: tuple[int, Any]) -> list[tuple[str, Any]]:
    status, reply = answer
    assert status == 200, reply
    (choice,) = reply["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    called = [each["function"] for each in choice["message"]["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in called]


def responses_calls(answer: tuple[int, Any]) -> list[tuple[str, Any]]:
    status, reply = answer
    assert status == 200, reply
    called = [each for each in reply["output"] if each["type"] == "function_call"]
    return [(each["name"], json.loads(each["arguments"])) for each in called]


def messages_calls(answer: tuple[int, Any]) -> list[tuple[str, Any]]:
    status, reply = answer
    assert status == 200, reply
    assert reply["stop_reason"] == "tool_use"
    called = [each for each in reply["content"] if each["type"] == "tool_use"]
    return [(each["name"], each["input"]) for each in called]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("chat/completions", CHAT, id="chat"),
        pytest.param("responses", RESPONSES, id="responses"),
        pytest.param("messages", MESSAGES, id="messages"),
    ],
)
async def test_an_engine_that_cannot_be_held_to_it_says_so(
    path: str, body: Any, tmp_path: Path
) -> None:
    write_model(tmp_path)
    engine = ScriptedEngine(
        model=tmp_path, weightless=True, stop_tokens=("<|im_end|>",), script=lambda _: "Hello."
    )
    await engine.install(1)
    async with gateway(engine, tmp_path) as client:
        status, refused = await client.post(path, body)
    assert (status, refused["error"]["message"]) == (
        400,
        "tool_choice: the engine of this run cannot do that",
    )
