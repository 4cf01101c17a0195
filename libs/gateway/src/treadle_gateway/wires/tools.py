"""Tools that clients offer, whatever their wire calls the fields."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, cast

from treadle_core.tickets import Json
from treadle_gateway.conversation import Tool, ToolChoice
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.fields import (
    MAX_NAME,
    Fields,
    Object,
    as_array,
    as_name,
    as_object,
    as_text,
    refuse,
    shown,
)
from treadle_gateway.wires.schemas import check_schema

MAX_TOOLS = 128
MAX_TOOL_NAME = 128
"""Characters."""
MAX_DESCRIPTION = 64 * 1024
"""Characters."""

Offered: TypeAlias = tuple[str, Json, Json, Json, str]
"""Where a tool stands in the request; its name, description and schema; its namespace."""

NO_PARAMETERS: Mapping[str, Json] = {"type": "object", "properties": {}}
"""Of a tool that states none."""


_MODES: tuple[Literal["auto", "none", "required"], ...] = ("auto", "none", "required")


def tools_of(offered: Iterable[Offered]) -> tuple[Tool, ...]:
    """Checks tools; two of one namespace have different names. Raises RefusedError."""
    found: list[Tool] = []
    names: set[tuple[str, str]] = set()
    for field, name, description, schema, namespace in offered:
        if len(found) == MAX_TOOLS:
            raise RefusedError(
                "invalid", f"tools: expected at most {MAX_TOOLS}, got more", field="tools"
            )
        tool = _tool(field, name, description, schema, namespace)
        if (namespace, tool.name) in names:
            refuse(f"{field}.name", "a name that no other tool has", tool.name)
        names.add((namespace, tool.name))
        found.append(tool)
    return tuple(found)


def _tool(field: str, name: Json, description: Json, schema: Json, namespace: str) -> Tool:
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_TOOL_NAME:
        refuse(f"{field}.name", f"a name of 1 to {MAX_TOOL_NAME} characters", name)
    said = "" if description is None else as_text(description, f"{field}.description")
    if len(said) > MAX_DESCRIPTION:
        refuse(f"{field}.description", f"at most {MAX_DESCRIPTION} characters", len(said))
    parameters = NO_PARAMETERS if schema is None else as_object(schema, f"{field}.parameters")
    check_schema(parameters, f"{field}.parameters")
    return Tool(name, said, parameters, namespace)


def chosen(
    mode: str, names: tuple[str, ...], tools: tuple[Tool, ...], *, parallel: bool
) -> ToolChoice:
    """What is to be called; `mode` in our words. Raises RefusedError where it is not there."""
    if mode == "required" and not tools:
        raise RefusedError(
            "invalid", "tool_choice: expected tools to choose from, got none", field="tool_choice"
        )
    offered = {tool.name for tool in tools}
    for name in names:
        if name not in offered:
            refuse("tool_choice", "the name of a tool that is offered", name)
    for known in _MODES:
        if known == mode:
            return ToolChoice(known, names, parallel)
    return refuse("tool_choice", "auto, none, required or a tool", mode)


def openai_choice(
    fields: Fields, tools: tuple[Tool, ...], inner: Callable[[Object, str], Json]
) -> ToolChoice:
    """What is to be called, in OpenAI's words.

    `inner` gives what an object says of a kind: itself, or what stands in it under that name.
    """
    parallel = fields.flag("parallel_tool_calls", default=True)
    stated = fields.raw("tool_choice")
    if stated is None:
        return ToolChoice(parallel=parallel)
    if isinstance(stated, str):
        return chosen(stated, (), tools, parallel=parallel)
    stated = as_object(stated, "tool_choice")
    if stated.get("type") != "allowed_tools":
        return chosen("required", (_named(stated, "tool_choice", inner),), tools, parallel=parallel)
    allowed = as_object(inner(stated, "allowed_tools"), "tool_choice.allowed_tools")
    names = tuple(
        _named(as_object(each, f"tool_choice.tools.{at}"), f"tool_choice.tools.{at}", inner)
        for at, each in enumerate(as_array(allowed.get("tools"), "tool_choice.tools"))
    )
    return chosen(str(allowed.get("mode")), names, tools, parallel=parallel)


def _named(stated: Object, field: str, inner: Callable[[Object, str], Json]) -> str:
    kind = stated.get("type")
    if kind not in ("function", "custom"):
        refuse(f"{field}.type", "function, custom or allowed_tools", kind)
    named = as_object(inner(stated, str(kind)), f"{field}.{kind}")
    return as_name(named.get("name"), f"{field}.name")


def unmet(choice: ToolChoice, tools: tuple[Tool, ...]) -> tuple[str, ...]:
    """Wishes about calls that nothing enforces, to be named among what was ignored.

    To hold a policy to them that may also call nothing would shape all that it says.
    """
    if choice.mode != "auto" or not tools:
        return ()
    wishes = {"parallel_tool_calls": not choice.parallel, "allowed_tools": bool(choice.names)}
    return tuple(name for name, stated in wishes.items() if stated)


def arguments_of(value: Json, field: str) -> str:
    """Arguments of a call as one text; a client may have read them already."""
    if isinstance(value, str):
        return value
    return arguments_text(as_object(value, field))


def arguments_text(value: Mapping[str, Json]) -> str:
    """Arguments as JSON that stays what it is when it is read again."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair, which an escape can state
        return json.dumps(value)
    return text


def called_with(arguments: str) -> dict[str, Json]:
    """Arguments as the object that some wires show; what is none is shown as it was said."""
    try:
        value: Any = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return cast("dict[str, Json]", value)
    return {"__unparsedToolInput": {"raw": arguments, "len": len(arguments)}}


def kind_name(value: Json) -> str:
    """Type of a tool, to be named among what was ignored."""
    return f"tools.{value}"[:MAX_NAME] if isinstance(value, str) else f"tools.{shown(value)}"
