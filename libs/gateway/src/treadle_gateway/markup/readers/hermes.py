"""Format `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; also Qwen's."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.readers.block import Block
from treadle_gateway.markup.readers.json_calls import JsonCalls
from treadle_gateway.markup.readers.rules import Tokens, either, json_call, marker, one_or_more


@dataclass(frozen=True, slots=True)
class Hermes:
    """JSON between tags."""

    name: str = "hermes"
    opens: str = "<tool_call>"
    closes: str = "</tool_call>"
    bare: bool = False
    inner: frozenset[str] = frozenset()

    def block(self, tools: Mapping[str, Tool], *, bare: bool) -> Block:
        del tools, bare
        return JsonCalls()

    def grammar(self, tools: Mapping[str, Tool], tokens: Tokens, *, several: bool) -> str:
        opens, closes = marker(tokens, self.opens), marker(tokens, self.closes)
        call = either(json_call(name, tool, "arguments") for name, tool in tools.items())
        return (
            f"calls: {one_or_more('block', 'SPACE?', several=several)}\n"
            f"block: {opens} SPACE? {call} SPACE? {closes}"
        )
