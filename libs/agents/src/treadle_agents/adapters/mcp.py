"""Tools of servers that speak the Model Context Protocol, offered to a policy."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, cast

from treadle_agents.adapters.libraries import library
from treadle_agents.adapters.policy import NoRoomError, Policy
from treadle_agents.chat_agent import ChatAgent, ChatContext
from treadle_agents.env import Result
from treadle_agents.graders import Exact, Grader
from treadle_core.errors import InvalidFieldError

_EXTRA = "mcp"


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is: a `command` that is started for the episode, or a `url`."""

    command: list[str] = field(default_factory=list[str])
    """The program and its words; it is spoken to by its standard input and output."""
    environment: dict[str, str] = field(default_factory=dict[str, str])
    """More variables than the few that every program needs."""
    url: str = ""
    """Of a streamable HTTP endpoint."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Sent with every request to `url`."""


class McpTools:
    """The tools of some servers, while `async with` holds them; for a ChatAgent or an Env.

    Where there are several servers, a tool is offered as `SERVER_TOOL`.
    """

    offered: list[dict[str, Any]]
    """The tools, in OpenAI's form."""

    def __init__(self, servers: Mapping[str, Server]) -> None:
        """Takes the servers by name. Raises InvalidFieldError for one that says not where it is."""
        for name, server in servers.items():
            if bool(server.command) == bool(server.url):
                raise InvalidFieldError(
                    f"agent.servers.{name}", limit="either a command or a url", value=server
                )
        self._mcp = library("mcp", extra=_EXTRA)
        self._servers = servers
        self._stack = AsyncExitStack()
        self._found: dict[str, tuple[Any, str]] = {}
        self.offered = []

    async def __aenter__(self) -> Self:
        async with self._stack:  # closes those that were opened where another one fails
            for name, server in self._servers.items():
                await self._open(name, server)
            self._stack = self._stack.pop_all()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._stack.aclose()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a tool as text; that it failed, or does not exist, is a result too."""
        if name not in self._found:
            return f"Error: there is no tool {name!r}; there are {', '.join(self._found)}."
        client, own_name = self._found[name]
        try:
            result = await client.call_tool(own_name, dict(arguments))
        except self._mcp.MCPError as error:
            return f"Error: {error}"
        text = "\n".join(map(_said, result.content))
        return f"Error: {text}" if result.is_error else text

    async def _open(self, name: str, server: Server) -> None:
        client = await self._stack.enter_async_context(
            self._mcp.Client(await self._transport(server))
        )
        cursor = None
        while True:
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                self._offer(tool, f"{name}_{tool.name}" if len(self._servers) > 1 else tool.name)
                self._found[self.offered[-1]["function"]["name"]] = client, tool.name
            if not (cursor := page.next_cursor):
                return

    async def _transport(self, server: Server) -> Any:
        if server.command:
            program, *words = server.command
            told = {"command": program, "args": words, "env": server.environment or None}
            return self._mcp.stdio_client(self._mcp.StdioServerParameters(**told))
        http = library("mcp.client.streamable_http", extra=_EXTRA)
        client = await self._stack.enter_async_context(
            http.create_mcp_http_client(headers=server.headers)
        )
        return http.streamable_http_client(server.url, http_client=client)

    def _offer(self, tool: Any, name: str) -> None:
        function = {
            "name": name,
            "description": tool.description or "",
            "parameters": tool.input_schema,
        }
        self.offered.append({"type": "function", "function": function})


class McpAgent(ChatAgent):
    """Lets the policy call the tools of servers until it answers, and grades the answer.

    Inherit and set `grader` for another worth. An agent out of turns or room is truncated, and its
    answer is empty.
    """

    grader: ClassVar[Grader] = Exact()
    """What an answer is worth; its own failure fails the episode."""

    def __init__(self, servers: dict[str, Server], system: str = "", max_turns: int = 16) -> None:
        """Takes the servers by name, as `McpTools`; `max_turns` of the policy at the most."""
        self._tools = McpTools(servers)
        self._system = [{"role": "system", "content": system}] if system else []
        self._max_turns = max_turns

    async def run(self, context: ChatContext) -> Result:
        messages = [*self._system, *context.messages]
        calls = 0
        async with self._tools as tools, Policy(context, extra=_EXTRA) as policy:
            try:
                for _ in range(self._max_turns):
                    reply = await policy.ask(messages, tools=tools.offered)
                    messages.append(reply.message)
                    if not reply.calls:
                        return await self._worth(context, reply.content, calls)
                    messages += [await _result_of(tools, call) for call in reply.calls]
                    calls += len(reply.calls)
            except NoRoomError:
                pass  # like one without turns
        return await self._worth(context, "", calls, truncated=True)

    async def _worth(
        self, context: ChatContext, answer: str, calls: int, *, truncated: bool = False
    ) -> Result:
        reward = await asyncio.to_thread(self.grader, answer, context.task)
        return Result(reward=reward, truncated=truncated, metrics={"calls": float(calls)})


async def _result_of(tools: McpTools, call: dict[str, Any]) -> dict[str, Any]:
    """The message that answers a call in OpenAI's form."""
    function = call["function"]
    try:
        arguments: Any = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        arguments = error
    if isinstance(arguments, dict):
        content = await tools.call(function["name"], cast("dict[str, Any]", arguments))
    else:
        content = f"Error: arguments: expected a JSON object, got {arguments}."
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


def _said(part: Any) -> str:
    """A part of a result as text; what is not text is only named."""
    return part.text if part.type == "text" else f"[{part.type}]"
