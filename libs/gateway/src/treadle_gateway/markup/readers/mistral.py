"""Format `mistral`: `[TOOL_CALLS]`, then an array of JSON objects, or a name and `[ARGS]`."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.readers.block import Argued, Block, Ended, Named, Step
from treadle_gateway.markup.readers.json_calls import JsonCalls
from treadle_gateway.markup.readers.rules import (
    Tokens,
    arguments,
    either,
    json_call,
    marker,
    one_or_more,
    quoted,
)

_ARGUMENTS = "[ARGS]"
_ID = "[CALL_ID]"
_OWN_ID = "OWN: /[a-zA-Z0-9]{9}/"


@dataclass(frozen=True, slots=True)
class Mistral:
    """Both ways that the family has had: the block itself says which."""

    name: str = "mistral"
    opens: str = "[TOOL_CALLS]"
    closes: str = ""
    bare: bool = False
    inner: frozenset[str] = frozenset((_ARGUMENTS, _ID))

    def block(self, tools: Mapping[str, Tool], *, bare: bool) -> Block:
        del tools, bare
        return _Calls()

    def grammar(self, tools: Mapping[str, Tool], tokens: Tokens, *, several: bool) -> str:
        opens, between = marker(tokens, self.opens), 'SPACE? "," SPACE?'
        own = '("," SPACE? "\\"id\\":" SPACE? "\\"" OWN "\\"")?'
        call = either(json_call(name, tool, "arguments", own) for name, tool in tools.items())
        array = one_or_more("call", between, several=several)
        rules = [f'array: {opens} SPACE? "[" SPACE? {array} SPACE? "]"', f"call: {call}", _OWN_ID]
        if _ARGUMENTS not in tokens:
            return "\n".join(["calls: array", *rules])
        own = f"({marker(tokens, _ID)} OWN)?" if _ID in tokens else ""
        behind = f"{own} {marker(tokens, _ARGUMENTS)}"
        named = either(f"{quoted(name)} {behind} {arguments(each)}" for name, each in tools.items())
        others = one_or_more("named", "", several=several)
        return "\n".join([f"calls: array | {others}", f"named: {opens} {named}", *rules])


class _Calls:
    """An array is told object by object, since ids come last; named arguments as they come."""

    def __init__(self) -> None:
        self._head: str | None = ""  # up to the arguments; None behind it
        self._array: JsonCalls | None = None

    def feed(self, text: str) -> list[Step]:
        if self._array is not None:
            return self._array.feed(text)
        if self._head is None:
            return [Argued(text)]
        self._head += text
        if self._head.lstrip()[:1] in ("[", "{"):
            self._array = JsonCalls(whole=True)
            return self._array.feed(self._head)
        named, found, arguments = self._head.partition(_ARGUMENTS)
        if not found:
            return []
        self._head = None
        name, _, own = named.partition(_ID)
        return [Named(name.strip(), own.strip()), *([Argued(arguments)] if arguments else [])]

    def end(self) -> list[Step]:
        if self._array is not None:
            return self._array.end()
        return [Ended()] if self._head is None else []
