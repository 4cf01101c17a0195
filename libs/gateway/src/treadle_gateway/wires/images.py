"""Images in requests: by data URI or by content reference, never by address.

A picture is not decoded here: its header says what it is and how large it would be.
"""

import base64
import binascii
import re
from hashlib import sha256

from treadle_gateway.conversation import Image
from treadle_gateway.errors import RefusedError
from treadle_gateway.wires.headers import NotAnImageError, measured

MAX_BYTES = 20 * 1024 * 1024
"""Of one image, decoded from base64."""
MAX_PIXELS = 32 * 1024 * 1024
"""Width times height of one frame."""
MAX_FRAMES = 8
MAX_IMAGES = 256
"""Of one request."""

_REFERENCE = re.compile(r"treadle:sha256:([0-9a-f]{64})")
_DATA = re.compile(r"data:([a-zA-Z0-9.+/-]{1,64})(?:;[a-zA-Z0-9=._-]{1,64})*;base64,", re.ASCII)
_ALIASES = {"image/jpg": "image/jpeg"}
_KINDS = ("image/png", "image/jpeg", "image/webp", "image/gif")


class Gallery:
    """The images of one request; each content once."""

    def __init__(self) -> None:
        self.media: dict[str, bytes] = {}
        self._count = 0

    def from_url(self, url: str, field: str) -> Image:
        """An image by data URI, or by `treadle:sha256:` and 64 hex digits.

        A reference has no media type: who keeps the content knows it.
        """
        self._charge(field)
        reference = _REFERENCE.fullmatch(url)
        if reference:
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
        if kind not in _KINDS:
            raise _refused(field, f"one of {', '.join(_KINDS)}; not {media_type[:64]}")
        if len(data) > MAX_BYTES // 3 * 4 + 4:
            raise RefusedError(
                "too_large", f"{field}: expected an image of at most {MAX_BYTES} bytes", field=field
            )
        try:
            content = base64.b64decode(data, validate=True)
        except (binascii.Error, ValueError):
            raise _refused(field, "base64") from None
        try:
            size = measured(content, max_frames=MAX_FRAMES)
        except NotAnImageError as error:
            raise _refused(field, f"an image: {error}") from None
        if size.kind != kind:
            raise _refused(field, f"{kind}, as it says; its bytes are {size.kind}")
        if size.width * size.height > MAX_PIXELS:
            raise _refused(field, f"at most {MAX_PIXELS} pixels; not {size.width} x {size.height}")
        if size.frames > MAX_FRAMES:
            raise _refused(field, f"at most {MAX_FRAMES} frames; not more")
        digest = sha256(content).hexdigest()
        self.media[digest] = content
        return Image(digest, kind)


def _refused(field: str, expected: str) -> RefusedError:
    return RefusedError("invalid", f"{field}: expected {expected}", field=field)
