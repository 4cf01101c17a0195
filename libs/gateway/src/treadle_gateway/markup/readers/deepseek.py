"""Format `deepseek`: `<｜tool▁calls▁begin｜>`, then each call between tokens of its own."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.readers.block import Argued, Block, Ended, Named, Step
from treadle_gateway.markup.readers.rules import (
    Tokens,
    arguments,
    either,
    marker,
    one_or_more,
    quoted,
)

_BEGINS = "<｜tool▁call▁begin｜>"
_SEPARATES = "<｜tool▁sep｜>"
_ENDS = "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"(?P<name>[^\n]*)\n```(?:json)?\n(?P<arguments>.*?)(?:\n```\s*)?\Z", re.S)


@dataclass(frozen=True, slots=True)
class DeepSeek:
    """The arguments are fenced behind the name, or stand alone behind the separator."""

    name: str = "deepseek"
    opens: str = "<｜tool▁calls▁begin｜>"
    closes: str = "<｜tool▁calls▁end｜>"
    bare: bool = False
    inner: frozenset[str] = frozenset((_BEGINS, _SEPARATES, _ENDS))

    def block(self, tools: Mapping[str, Tool], *, bare: bool) -> Block:
        del tools, bare
        return _Calls()

    def grammar(self, tools: Mapping[str, Tool], tokens: Tokens, *, several: bool) -> str:
        opens, closes = marker(tokens, self.opens), marker(tokens, self.closes)
        begins, separates, ends = (marker(tokens, each) for each in (_BEGINS, _SEPARATES, _ENDS))
        fence, fenced = quoted("\n```json\n"), quoted("\n```")
        said = [
            f'"function" {separates} {quoted(name)} {fence} {arguments(tool)} {fenced}'
            for name, tool in tools.items()
        ]
        said += [f"{quoted(name)} {separates} {arguments(tool)}" for name, tool in tools.items()]
        return (
            f"calls: {opens} {one_or_more('call', 'SPACE?', several=several)} SPACE? {closes}\n"
            f"call: {begins} {either(said)} {ends}"
        )


class _Calls:
    """Block of calls, each told once it is whole."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> list[Step]:
        self._held += text
        if ">" not in text:  # no call has ended; its text may be long
            return []
        steps: list[Step] = []
        while _ENDS in self._held:
            call, _, self._held = self._held.partition(_ENDS)
            steps += _call(call)
        return steps

    def end(self) -> list[Step]:
        call, self._held = self._held, ""
        return _call(call)


def _call(said: str) -> list[Step]:
    """What one call says, whole or cut off."""
    before, separated, behind = said.partition(_BEGINS)[2].partition(_SEPARATES)
    if not separated:
        return []
    fenced = _FENCED.match(behind)
    name, arguments = (fenced["name"], fenced["arguments"]) if fenced else (before, behind)
    return [Named(name.strip()), Argued(arguments), Ended()] if name.strip() else []
