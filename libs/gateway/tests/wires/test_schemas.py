"""Schemas and tools: what could cost more than it may is refused at once."""

import time
from typing import Any

import pytest

from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.chat import Chat
from treadle_gateway.wires.schemas import check_schema
from treadle_gateway.wires.tools import tools_of


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def laughs(levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {"l0": {"type": "string"}}
    for level in range(1, levels):
        below = {"$ref": f"#/$defs/l{level - 1}"}
        definitions[f"l{level}"] = {"properties": {"a": below, "b": below}}
    return {"$defs": definitions, "$ref": f"#/$defs/l{levels - 1}"}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({}, id="anything"),
        pytest.param(nested(16), id="deepest"),
        pytest.param(laughs(6), id="shared-definitions"),
        pytest.param(
            {"$defs": {"a": {"type": "string"}, "b/c": True}, "anyOf": [{"$ref": "#/$defs/a"}]},
            id="definitions",
        ),
        pytest.param({"$defs": {"b/c": {}}, "$ref": "#/$defs/b~1c"}, id="escaped-name"),
        pytest.param({"$defs": {"a": {}}, "anyOf": [{"$ref": "#/anyOf/1"}, {}]}, id="by-place"),
        pytest.param({"properties": {"$ref": {"type": "string"}, "pattern": {}}}, id="odd-names"),
        pytest.param({"pattern": r"^\d{4}-\d{2}$", "patternProperties": {"^x-": {}}}, id="pattern"),
    ],
)
def test_a_fit_schema_passes(schema: dict[str, Any]) -> None:
    check_schema(schema, "schema")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        pytest.param({"description": "x" * 65_536}, "at most 65536 bytes", id="large"),
        pytest.param(nested(17), "at most 16 schemas within each other", id="deep"),
        pytest.param({"$ref": "#"}, "no schema within itself", id="itself"),
        pytest.param(
            {"properties": {"a": {"$ref": "#/properties/a"}}}, "within itself", id="own-place"
        ),
        pytest.param(
            {
                "$defs": {
                    "a": {"items": {"$ref": "#/$defs/b"}},
                    "b": {"items": {"$ref": "#/$defs/a"}},
                },
                "$ref": "#/$defs/a",
            },
            "within itself",
            id="in-a-circle",
        ),
        pytest.param({"$ref": "#/$defs/none"}, "references to what is there", id="nowhere"),
        pytest.param({"$ref": "http://10.0.0.1/s"}, "references within the schema", id="remote"),
        pytest.param(laughs(40), "once references are replaced", id="laughs"),
        pytest.param({"pattern": "a" * 2000}, "a pattern that ends in time", id="long-pattern"),
    ],
)
def test_a_bomb_is_refused_at_once(schema: dict[str, Any], words: str) -> None:
    started = time.process_time()
    with pytest.raises(RefusedError) as refused:
        check_schema(schema, "tools.0.parameters")
    assert time.process_time() - started < 0.5
    assert words in refused.value.message
    assert refused.value.field == "tools.0.parameters"


def test_megabytes_of_schema_are_refused_at_once() -> None:
    schema: dict[str, Any] = {"enum": [{"const": "x" * 1000}] * 10_000}
    started = time.process_time()
    with pytest.raises(RefusedError, match="at most 65536 bytes"):
        check_schema(schema, "schema")
    assert time.process_time() - started < 0.5


def test_there_are_at_most_128_tools() -> None:
    offered = [(f"tools.{n}", f"f{n}", None, None, "") for n in range(129)]
    assert len(tools_of(offered[:128])) == 128
    with pytest.raises(RefusedError, match="at most 128"):
        tools_of(offered)


@pytest.mark.parametrize(
    ("offered", "field"),
    [
        pytest.param(("tools.0", None, None, None, ""), "tools.0.name", id="no-name"),
        pytest.param(("tools.0", "", None, None, ""), "tools.0.name", id="empty-name"),
        pytest.param(("tools.0", "x" * 129, None, None, ""), "tools.0.name", id="long-name"),
        pytest.param(("tools.0", "f", 5, None, ""), "tools.0.description", id="description"),
        pytest.param(("tools.0", "f", None, [], ""), "tools.0.parameters", id="no-schema"),
    ],
)
def test_a_wrong_tool_is_refused_by_name(offered: Any, field: str) -> None:
    with pytest.raises(RefusedError) as refused:
        tools_of([offered])
    assert refused.value.field == field


def test_the_form_of_the_text_is_checked_as_well() -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}}
    body: Any = {"model": "m", "messages": [{"role": "user"}], "response_format": form}
    with pytest.raises(RefusedError) as refused:
        Chat().ask(body, {})
    assert refused.value.field == "response_format.schema"
