"""Format `llama`: JSON behind `<|python_tag|>`, or a reply that is nothing but JSON."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.readers.block import Block, Step
from treadle_gateway.markup.readers.json_calls import JsonCalls, unquoted
from treadle_gateway.markup.readers.rules import Tokens, either, json_call, marker, one_or_more

_NAME = re.compile(r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class Llama:
    """JSON, with `parameters` rather than `arguments`; several are apart by `;`."""

    name: str = "llama"
    opens: str = "<|python_tag|>"
    closes: str = ""
    bare: bool = True
    inner: frozenset[str] = frozenset()

    def block(self, tools: Mapping[str, Tool], *, bare: bool) -> Block:
        return _Bare(tools) if bare else JsonCalls()

    def grammar(self, tools: Mapping[str, Tool], tokens: Tokens, *, several: bool) -> str:
        between = 'SPACE? ";" SPACE?'
        return (
            f"calls: {marker(tokens, self.opens)} SPACE? bare\n"
            f"bare: {one_or_more('call', between, several=several)}\n"
            f"call: {either(json_call(name, tool, 'parameters') for name, tool in tools.items())}"
        )


class _Bare:
    """Block without a marker: it is one if it names a tool that there is, else it is an answer."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._held = ""
        self._calls: JsonCalls | None = None

    def feed(self, text: str) -> list[Step]:
        if self._calls is not None:
            return self._calls.feed(text)
        self._held += text
        found = _NAME.match(self._held)
        if found is None or unquoted(found[1]) not in self._tools:
            return []
        self._calls = JsonCalls()
        return self._calls.feed(self._held)

    def end(self) -> list[Step]:
        return self._calls.end() if self._calls is not None else []
