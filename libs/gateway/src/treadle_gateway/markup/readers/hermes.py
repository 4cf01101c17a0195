"""Format `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`; also Qwen's."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.readers.block import Block
from treadle_gateway.markup.readers.json_calls import JsonCalls


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
