"""Rules of a grammar for tool calls, in the dialect of Lark that llguidance reads; pure.

Where a format leaves white space free, so do the rules: a policy keeps its own habits.
"""

import json
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from treadle_core.tickets import Json
from treadle_gateway.conversation import Tool

SHARED = "SPACE: /[ \\t\\n]{1,4}/"
"""Rule that all others may use."""

Tokens: TypeAlias = Mapping[str, int]
"""The added tokens of a model, by their texts."""


def quoted(text: str) -> str:
    """A text."""
    return json.dumps(text, ensure_ascii=False)


def marker(tokens: Tokens, text: str) -> str:
    """A marker: the token that it is, or its text where it is none."""
    return f"<[{tokens[text]}]>" if text in tokens else quoted(text)


def either(rules: Iterable[str]) -> str:
    """One of several."""
    return f"({' | '.join(rules)})"


def one_or_more(rule: str, between: str, *, several: bool) -> str:
    """A rule, and where there may be `several` any number of it."""
    return f"{rule} ({between} {rule})*" if several else rule


def arguments(tool: Tool) -> str:
    """The arguments of a call: a JSON object that obeys the tool's schema."""
    return value({"type": "object", **tool.parameters})


def value(schema: Mapping[str, Json]) -> str:
    """A JSON value that obeys a schema."""
    return f"%json {json.dumps(schema)}"


def json_call(name: str, tool: Tool, key: str, more: str = "") -> str:
    """A call as an object of name and arguments; the latter are under `key`, `more` behind them."""
    named = f'"{{" SPACE? "\\"name\\":" SPACE? {quoted(json.dumps(name))}'
    argued = f'"," SPACE? {quoted(f"{json.dumps(key)}:")} SPACE? {arguments(tool)}'
    return f'{named} {argued} {more} SPACE? "}}"'
