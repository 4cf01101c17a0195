"""Format `qwen-coder`: a `<function=...>` with a `<parameter=...>` for each argument."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from treadle_gateway.conversation import Tool
from treadle_gateway.markup.readers.block import Argued, Block, Ended, Named, Step
from treadle_gateway.markup.readers.rules import (
    Tokens,
    either,
    marker,
    one_or_more,
    quoted,
    value,
)

_FUNCTION = re.compile(r"<function=([^>\n]+)>")
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>|\n?(?=<parameter=)|\n?</function>|\Z)", re.S
)


_WORDS = (
    "words[lazy]: WORDS\n"
    r"WORDS: /(?s:.*)\n<\/parameter>/ & ~/(?s:.*)(<parameter=|<\/?function|<\/?tool_call>)(?s:.*)/"
)
"""Plain text as the value of a parameter, up to its end; no tag that would end it earlier."""


@dataclass(frozen=True, slots=True)
class QwenCoder:
    """Tags of the function and its parameters; the values are plain text."""

    name: str = "qwen-coder"
    opens: str = "<tool_call>"
    closes: str = "</tool_call>"
    bare: bool = False
    inner: frozenset[str] = frozenset()

    def block(self, tools: Mapping[str, Tool], *, bare: bool) -> Block:
        del bare
        return _Tags(tools)

    def grammar(self, tools: Mapping[str, Tool], tokens: Tokens, *, several: bool) -> str:
        opens, closes = marker(tokens, self.opens), marker(tokens, self.closes)
        function = either(_function_rule(name, tool) for name, tool in tools.items())
        return (
            f"calls: {one_or_more('block', 'SPACE?', several=several)}\n"
            f"block: {opens} SPACE? {function} SPACE? {closes}\n{_WORDS}"
        )


class _Tags:
    """Block of one function. Its arguments are told when it is over: a value has no type before."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._body = ""
        self._name = ""

    def feed(self, text: str) -> list[Step]:
        self._body += text
        if self._name or ">" not in text or not (found := _FUNCTION.search(self._body)):
            return []
        self._name = found[1].strip()
        self._body = self._body[found.end() :]
        return [Named(self._name)]

    def end(self) -> list[Step]:
        if not self._name:
            return []
        types = _types(self._tools.get(self._name))
        arguments = {
            found[1].strip(): _value(found[2], types.get(found[1].strip()))
            for found in _PARAMETER.finditer(self._body)
        }
        return [Argued(json.dumps(arguments, ensure_ascii=False)), Ended()]


def _types(tool: Tool | None) -> dict[str, Any]:
    """Types of a tool's parameters; None where any will do."""
    properties = tool.parameters.get("properties") if tool else None
    if not isinstance(properties, Mapping):
        return {}
    named = cast("Mapping[str, Any]", properties)
    return {
        name: cast("Mapping[str, Any]", each).get("type")
        for name, each in named.items()
        if isinstance(each, Mapping)
    }


def _function_rule(name: str, tool: Tool) -> str:
    """A call: the parameters that the schema names, in its order, those that it requires at least.

    Of a text only the choices that there are for it are held to, not its pattern or length.
    """
    parameters: Mapping[str, Any] = tool.parameters
    required: Any = parameters.get("required", ())
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    properties: Mapping[str, Any] = parameters.get("properties", {})
    written = [
        f"({_parameter_rule(each, {**shared, **schema})} SPACE?){'' if each in required else '?'}"
        for each, schema in properties.items()
        if isinstance(schema, Mapping)
    ]
    opens, closes = quoted(f"<function={name}>"), quoted("</function>")
    return f"{opens} SPACE? {' '.join(written)} {closes}"


def _parameter_rule(name: str, schema: Mapping[str, Any]) -> str:
    opens, closes = quoted(f"<parameter={name}>\n"), quoted("\n</parameter>")
    if schema.get("type") not in ("string", ["string"]):
        return f"{opens} {value(schema)} {closes}"
    choices: Any = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is None:
        return f"{opens} words"
    return f"{opens} {either(quoted(str(each)) for each in choices)} {closes}"


def _value(said: str, kind: Any) -> Any:
    """A value of the type that the schema wants, where the text has one; else the text."""
    if kind == "string" or kind == ["string"]:
        return said
    try:
        return json.loads(said)
    except (ValueError, RecursionError):
        return said
