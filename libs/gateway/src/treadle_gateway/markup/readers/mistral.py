"""Format `mistral`: `[TOOL_CALLS]`, then an array of JSON objects, or a name and `[ARGS]`."""

from collections.abc import Mapping
from dataclasses import dataclass

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.readers.block import Argued, Block, Ended, Named, Step
from treadle_gateway.markup.readers.json_calls import JsonCalls

_ARGUMENTS = "[ARGS]"
_ID = "[CALL_ID]"


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
