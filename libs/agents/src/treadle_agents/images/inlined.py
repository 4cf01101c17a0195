"""A task's images in the messages of its user, as OpenAI clients send them."""

import base64
import binascii
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from treadle_agents.images.headers import NotAnImageError
from treadle_agents.images.picture import Picture
from treadle_core.tickets import Json

MARKER = "<image>"
"""Where the words of a user have an image."""


def inlined(messages: Sequence[Mapping[str, Any]], images: Sequence[Json]) -> list[dict[str, Any]]:
    """The messages with the images in place of the markers in what users say, in order.

    A marker for which no image is left stays as it is. Raises ValueError naming an image that is
    none.
    """
    urls = (_url(place, image) for place, image in enumerate(images))
    return [
        {**message, "content": _content(message.get("content"), urls)}
        if images and message.get("role") == "user"
        else dict(message)
        for message in messages
    ]


def _content(content: Any, urls: Iterator[str]) -> Any:
    if isinstance(content, str):
        return _parts(content, urls) if MARKER in content else content
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in cast("list[Any]", content):
        text = cast("dict[str, Any]", part).get("text") if isinstance(part, dict) else None
        parts += _parts(text, urls) if isinstance(text, str) and MARKER in text else [part]
    return parts


def _parts(text: str, urls: Iterator[str]) -> list[dict[str, Any]]:
    """A text as parts: its words, and an image at each marker while there are some."""
    parts: list[dict[str, Any]] = []
    words, *behind = text.split(MARKER)
    for more in behind:
        url = next(urls, None)
        if url is None:
            words += MARKER + more
            continue
        parts += [{"type": "text", "text": words}] if words else []
        parts.append({"type": "image_url", "image_url": {"url": url}})
        words = more
    return [*parts, {"type": "text", "text": words}] if words else parts


def _url(place: int, image: Json) -> str:
    """A data URI or content reference as it is; of base64, and of a file's path, its data URI."""
    if not isinstance(image, str):
        raise _none(place, type(image).__name__)
    if image.startswith(("data:", "treadle:")):
        return image
    try:
        data = base64.b64decode(image, validate=True)
        picture = Picture.of(data)
    except (binascii.Error, ValueError, NotAnImageError):
        try:
            data = Path(image).read_bytes()
            picture = Picture.of(data)
        except (OSError, ValueError, NotAnImageError) as error:
            raise _none(place, f"{image[:80]!r}: {error}"[:300]) from error
    return f"data:{picture.medium.media_type};base64,{base64.b64encode(data).decode()}"


def _none(place: int, found: str) -> ValueError:
    return ValueError(
        f"task.images[{place}]: expected a data URI, a content reference, base64, or the path of "
        f"an image, got {found}"
    )
