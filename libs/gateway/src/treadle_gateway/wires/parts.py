"""What a message says, as OpenAI's wires state it."""

from collections.abc import Callable

from treadle_core.tickets import Json
from treadle_gateway.conversation import Part, Text
from treadle_gateway.wires.fields import Object, as_object, refuse


def parts_of(
    content: Json, field: str, read: Callable[[Object, str], Part | None]
) -> tuple[Part, ...]:
    """Content as a string or as parts; null, "" and absent are no parts. `read` reads a part."""
    if content is None:
        return ()
    if isinstance(content, str):
        return (Text(content),) if content else ()
    if not isinstance(content, list):
        refuse(field, "a string or an array", content)
    places = ((part, f"{field}.{at}") for at, part in enumerate(content))
    found = [read(as_object(part, place), place) for part, place in places]
    return tuple(part for part in found if part is not None)
