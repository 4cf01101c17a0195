"""`/v1/models`, for the clients of all wires: each finds the fields that it knows."""

from datetime import UTC, datetime

from treadle_core.tickets import Json
from treadle_gateway.errors import RefusedError


def model(name: str, *, created: int, max_context: int) -> dict[str, Json]:
    """The policy, under the name that it has for clients; `created` in seconds since 1970."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "display_name": name,
        "owned_by": "treadle",
        "max_model_len": max_context,
        "max_input_tokens": max_context - 1,
        "max_tokens": max_context - 1,
    }


def models(name: str, *, created: int, max_context: int) -> dict[str, Json]:
    """The list of models: there is one."""
    return {
        "object": "list",
        "data": [model(name, created=created, max_context=max_context)],
        "has_more": False,
        "first_id": name,
        "last_id": name,
    }


def check_model(asked: str, name: str) -> None:
    """Raises RefusedError where a client asks for another model: it never gets one silently."""
    if asked != name:
        raise RefusedError(
            "unknown_model",
            f"The model {asked[:64]!r} does not exist; it is {name!r}.",
            field="model",
        )
