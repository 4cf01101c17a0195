"""Images in requests: by data URI or by content reference, never by address."""

import base64
import binascii
import re

from treadle_agents.images.headers import NotAnImageError
from treadle_agents.images.picture import Picture
from treadle_core.media import MAX_MEDIUM_BYTES, MEDIA_TYPES
from treadle_gateway.conversation import Image
from treadle_gateway.errors import RefusedError

MAX_BYTES = MAX_MEDIUM_BYTES
"""Of one image, decoded from base64."""
MAX_IMAGES = 256
"""Of one request."""

_REFERENCE = re.compile(r"treadle:sha256:([0-9a-f]{64})")
_DATA = re.compile(r"data:([a-zA-Z0-9.+/-]{1,64})(?:;[a-zA-Z0-9=._-]{1,64})*;base64,", re.ASCII)
_ALIASES = {"image/jpg": "image/jpeg"}


class Gallery:
    """The images of one request; each content once."""

    def __init__(self) -> None:
        self.media: dict[str, Picture] = {}
        """Those whose bytes came, by sha256."""
        self.references: dict[str, str] = {}
        """By sha256, the field of each that was referred to."""
        self._count = 0

    def from_url(self, url: str, field: str) -> Image:
        """An image by data URI, or by `treadle:sha256:` and 64 hex digits.

        A reference has no media type: who keeps the content knows it.
        """
        self._charge(field)
        reference = _REFERENCE.fullmatch(url)
        if reference:
            self.references.setdefault(reference.group(1), field)
            return Image(reference.group(1), "")
        head = _DATA.match(url)
        if head is None:
            if url[:5].lower() == "data:":
                raise _refused(field, "a data URI with a media type and base64")
            raise _refused(field, "a data URI or treadle:sha256:...: remote media is disabled")
        return self._kept(head.group(1), url[head.end() :], field)

    def from_base64(self, media_type: str, data: str, field: str) -> Image:
        """An image as base64, without the words of a URI around it."""
        self._charge(field)
        return self._kept(media_type, data, field)

    def _charge(self, field: str) -> None:
        self._count += 1
        if self._count > MAX_IMAGES:
            raise _refused(field, f"at most {MAX_IMAGES} images")

    def _kept(self, media_type: str, data: str, field: str) -> Image:
        kind = _ALIASES.get(media_type.lower(), media_type.lower())
        if kind not in MEDIA_TYPES:
            raise _refused(field, f"one of {', '.join(MEDIA_TYPES)}; not {media_type[:64]}")
        if len(data) > MAX_BYTES // 3 * 4 + 4:
            raise RefusedError(
                "too_large", f"{field}: expected an image of at most {MAX_BYTES} bytes", field=field
            )
        try:
            content = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise _refused(field, "base64") from None
        try:
            picture = Picture.of(content)
        except NotAnImageError as error:
            raise _refused(field, f"an image: {error}") from None
        found = picture.medium.media_type
        if found != kind:
            raise _refused(field, f"{kind}, as it says; its bytes are {found}")
        self.media[picture.medium.sha256] = picture
        return Image(picture.medium.sha256, kind)


def _refused(field: str, expected: str) -> RefusedError:
    return RefusedError("invalid", f"{field}: expected {expected}", field=field)
