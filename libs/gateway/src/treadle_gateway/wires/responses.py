"""OpenAI Responses: `/v1/responses`."""

from collections.abc import Mapping

from treadle_core.tickets import Json
from treadle_gateway.conversation import Ask, Message, Reply, Text, Tool
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.fields import Fields, Object, as_array, as_name, as_object
from treadle_gateway.wires.identity import identity
from treadle_gateway.wires.refusals import openai_refusal
from treadle_gateway.wires.responses_input import ItemReader
from treadle_gateway.wires.responses_output import (
    CUSTOM_PARAMETERS,
    items_of,
    response,
    status_of,
)
from treadle_gateway.wires.responses_stream import ResponsesStream
from treadle_gateway.wires.sampling import refuse_denied, room, schema_of, wanted
from treadle_gateway.wires.tools import Offered, kind_name, openai_choice, tools_of, unmet
from treadle_gateway.wires.wire import Begun

_STATEFUL = {
    "previous_response_id": (
        "responses are not stored here; send the whole conversation in input",
        "previous_response_not_found",
    ),
    "conversation": ("conversations are not stored here; send the whole in input", ""),
    "prompt": ("prompts are not stored here; send the whole conversation in input", ""),
}


class Responses:
    """Wire of the Responses API."""

    name = "responses"
    call_prefix = "call_"
    refusal = staticmethod(openai_refusal)

    def ask(self, body: Mapping[str, Json], headers: Mapping[str, str]) -> Ask:
        fields = Fields(body)
        refuse_denied(fields)
        _refuse_state(fields)
        reader = ItemReader()
        messages = _instructions(fields) + reader.messages(fields.raw("input"))
        tools, dropped = _tools(fields)
        choice = openai_choice(fields, tools, _inner)
        text = fields.object("text") or {}
        return Ask(
            model=fields.model(),
            messages=tuple(messages),
            tools=tools,
            choice=choice,
            wanted=wanted(fields, schema=schema_of(text.get("format"), "text.format")),
            max_tokens=room(fields, "max_output_tokens"),
            reasoning=(fields.object("reasoning") or {}).get("effort") != "none",
            stream=fields.flag("stream", default=False),
            identity=identity(headers),
            ignored=fields.unread() + dropped + unmet(choice, tools),
            media=reader.gallery.media,
            references=reader.gallery.references,
        )

    def reply(self, ask: Ask, reply: Reply) -> dict[str, Json]:
        return response(
            ask,
            reply.id,
            reply.created,
            status=status_of(reply),
            output=items_of(ask, reply),
            usage=reply.usage,
        )

    def stream(self, ask: Ask, begun: Begun) -> ResponsesStream:
        return ResponsesStream(ask, begun.id, begun.created)


def _refuse_state(fields: Fields) -> None:
    """Nothing is kept here between two requests but what capture records."""
    for name, (reason, code) in _STATEFUL.items():
        if fields.raw(name) is not None:
            raise RefusedError("invalid", f"{name}: {reason}", field=name, code=code)
    if fields.flag("background", default=False):
        raise RefusedError(
            "invalid", "background: responses are not stored here", field="background"
        )


def _instructions(fields: Fields) -> list[Message]:
    text = fields.text("instructions")
    return [Message("system", (Text(text),))] if text else []


def _tools(fields: Fields) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
    """Functions and custom tools, those within namespaces too; and what else there was."""
    offered: list[Offered] = []
    dropped: list[str] = []
    for at, value in enumerate(fields.array("tools") or ()):
        _offer(as_object(value, f"tools.{at}"), f"tools.{at}", "", offered, dropped)
    return tools_of(offered), tuple(dropped)


def _offer(
    tool: Object, field: str, namespace: str, offered: list[Offered], dropped: list[str]
) -> None:
    kind, name, description = tool.get("type"), tool.get("name"), tool.get("description")
    if kind == "function":
        offered.append((field, name, description, tool.get("parameters"), namespace))
    elif kind == "custom":
        offered.append((field, name, description, CUSTOM_PARAMETERS, namespace))
    elif kind == "namespace" and not namespace:
        outer = as_name(name, f"{field}.name")
        for at, value in enumerate(as_array(tool.get("tools"), f"{field}.tools")):
            place = f"{field}.tools.{at}"
            _offer(as_object(value, place), place, outer, offered, dropped)
    else:
        dropped.append(kind_name(kind))


def _inner(stated: Object, _: str) -> Json:
    """What an object of any kind says stands in itself."""
    return dict(stated)
