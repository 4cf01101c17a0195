"""Media of episodes: to the messages of `treadle.episode.v1` and back, and into a store."""

from collections.abc import Container, Iterable, Sequence

from treadle.episode.v1 import episode_pb2 as pb
from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_core.media import MAX_MEDIA, Medium
from treadle_payloads.store import GET_S, Buffer, PayloadReference, PayloadStore


def reference_of(medium: Medium) -> PayloadReference:
    """Names the bytes of a medium, and where they lie. Raises InvalidFieldError for its node."""
    return PayloadReference(medium.sha256, medium.size, medium.node, medium.epoch)


def put_medium(medium: Medium, data: bytes, store: PayloadStore, *, holder: str) -> Medium:
    """Stores the bytes of a medium for the episode `holder`; says where they are now.

    Raises PayloadCorruptError where `data` is not what it names, or what the store raises.
    """
    reference_of(medium).check(data)
    placed = store.put(data, holder=holder)
    return Medium(medium.sha256, medium.size, medium.media_type, placed.node, placed.epoch)


def fetch_media(
    media: Iterable[Medium], store: PayloadStore, *, timeout_s: float = GET_S
) -> dict[str, Buffer | TreadleError]:
    """The bytes of media by sha256, each content once, checked; or why they cannot be had.

    Takes at most about `timeout_s` seconds.
    """
    wanted = {medium.sha256: reference_of(medium) for medium in media}
    return dict(store.fetch(wanted.values(), timeout_s=timeout_s)) if wanted else {}


def medium_to_wire(medium: Medium) -> pb.Medium:
    return pb.Medium(
        sha256=medium.sha256,
        size=medium.size,
        media_type=medium.media_type,
        node=medium.node,
        epoch=medium.epoch,
    )


def media_from_wire(messages: Sequence[pb.Medium], field: str) -> tuple[Medium, ...]:
    """Raises InvalidFieldError, naming for example `result.media[0].size` for `result.media`.

    Whether the segments show them, `treadle_core.media.check_media` says.
    """
    if len(messages) > MAX_MEDIA:
        raise InvalidFieldError(field, limit=f"at most {MAX_MEDIA} entries", value=len(messages))
    media: dict[str, Medium] = {}
    for index, message in enumerate(messages):
        try:
            media[message.sha256] = _medium_from_wire(message, media)
        except InvalidFieldError as error:
            name = f"{field}[{index}].{error.field}"
            raise InvalidFieldError(name, limit=error.limit, value=error.value) from error
    return tuple(media.values())


def _medium_from_wire(message: pb.Medium, known: Container[str]) -> Medium:
    medium = Medium(message.sha256, message.size, message.media_type, message.node, message.epoch)
    reference_of(medium)  # checks the node
    if medium.sha256 in known:
        raise InvalidFieldError("sha256", limit="each once", value=medium.sha256)
    return medium
