import asyncio
import json
import runpy
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from treadle_agents.adapters.mcp import McpAgent, McpTools, Server
from treadle_agents.graders import Grader, Number
from treadle_core.episodes import Termination
from treadle_core.errors import InvalidFieldError

pytest.importorskip("mcp", reason='pip install "treadle-agents[mcp]"')
pytestmark = pytest.mark.processes

uvicorn = pytest.importorskip("uvicorn", reason="comes with mcp")
PROGRAM = Path(__file__).with_name("tool_server.py")
STDIO = Server(command=[sys.executable, str(PROGRAM)])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@asynccontextmanager
async def listening() -> AsyncIterator[str]:
    """The same server over HTTP."""
    server = runpy.run_path(str(PROGRAM))["server"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        app = server.streamable_http_app()
        running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        serving = asyncio.create_task(running.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        finally:
            running.should_exit = True
            await serving


async def check(tools: McpTools, prefix: str) -> None:
    names = [each["function"]["name"] for each in tools.offered]
    assert names == [f"{prefix}add", f"{prefix}divide"]
    add = tools.offered[0]["function"]
    assert add["description"] == "Adds two whole numbers."
    assert sorted(add["parameters"]["properties"]) == ["left", "right"]
    assert await tools.call(f"{prefix}add", {"left": 40, "right": 2}) == "42"
    for name, arguments in (
        ("divide", {"left": 1, "right": 0}),
        ("add", {"left": "many"}),
    ):
        assert (await tools.call(f"{prefix}{name}", arguments)).startswith("Error: ")
    assert "there is no tool 'multiply'" in await tools.call("multiply", {})


async def test_tools_of_a_program_are_offered_and_called() -> None:
    async with McpTools({"sums": STDIO}) as tools:
        await check(tools, "")


async def test_tools_over_http_are_offered_and_called() -> None:
    async with listening() as url, McpTools({"a": Server(url=url), "b": STDIO}) as tools:
        assert len(tools.offered) == 4
        assert await tools.call("a_add", {"left": 1, "right": 1}) == "2"
        assert await tools.call("b_add", {"left": 1, "right": 2}) == "3"


def test_a_server_is_a_program_or_an_address() -> None:
    for server in (Server(), Server(command=["x"], url="http://x")):
        with pytest.raises(InvalidFieldError, match=r"agent\.servers\.a: expected either"):
            McpTools({"a": server})


class Summing(McpAgent):
    grader: ClassVar[Grader] = Number()


def sums(prompt: str) -> str:
    """Tries what cannot be, then adds, then answers with what it was told."""
    if "<tool_response>\n42" in prompt:
        return "It is 42."
    if "Error" in prompt:
        return call("add", json.dumps({"left": 40, "right": 2}))
    return "Let me see.\n" + call("divide", json.dumps({"left": 1, "right": 0}))


async def test_an_agent_calls_until_it_answers_and_all_of_it_is_trained(talk: Any) -> None:
    agent = Summing({"sums": STDIO}, system="Use the tools.")
    talked = await talk(agent, {"prompt": "40 + 2?", "answer": 42}, sums)
    assert (talked.outcome.reward, talked.outcome.metrics) == (1, {"calls": 2})
    assert talked.outcome.termination is Termination.FINISHED
    assert "Use the tools." in talked.asked[0]
    assert '"name": "add"' in talked.asked[0]
    (segment,) = talked.segments
    assert segment.trained.tolist() == segment.sampled.tolist()
    assert len(talked.asked) == 3


@pytest.mark.parametrize(
    ("told", "room"),
    [pytest.param({"max_turns": 2}, 65536, id="turns"), pytest.param({}, 1500, id="room")],
)
async def test_an_agent_that_never_answers_is_truncated(talk: Any, told: Any, room: int) -> None:
    says = lambda prompt: call("add", '{"left": 1, "right": 1}')  # noqa: E731
    task = {"prompt": "?", "answer": 42}
    talked = await talk(Summing({"sums": STDIO}, **told), task, says, max_context=room)
    assert (talked.outcome.reward, talked.outcome.termination) == (0, Termination.TRUNCATED)
    assert talked.outcome.metrics["calls"] >= 1
