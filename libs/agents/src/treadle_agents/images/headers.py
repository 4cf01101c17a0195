"""What the first bytes of a picture say; nothing is decoded."""

from dataclasses import dataclass


class NotAnImageError(Exception):
    """The bytes are of no kind of picture that is known here, or are broken."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a picture would be."""

    kind: str
    """Media type."""
    width: int
    height: int
    """Pixels, both at least 1."""
    frames: int
    """At least 1; counted up to a bound."""


def measured(content: bytes, *, max_frames: int) -> Size:
    """Reads kind, size and number of frames. Counts one frame above `max_frames`, no more.

    Raises NotAnImageError.
    """
    try:
        if content.startswith(b"\x89PNG\r\n\x1a\n"):
            size = _png(content)
        elif content.startswith(b"\xff\xd8\xff"):
            size = _jpeg(content)
        elif content[:4] == b"RIFF" and content[8:12] == b"WEBP":
            size = _webp(content, max_frames)
        elif content[:6] in (b"GIF87a", b"GIF89a"):
            size = _gif(content, max_frames)
        else:
            raise NotAnImageError("the first bytes are of no known kind")
    except IndexError:
        raise NotAnImageError("it ends within its header") from None
    if min(size.width, size.height, size.frames) < 1:
        raise NotAnImageError("it has no pixels")
    return size


def _number(content: bytes, at: int, count: int, order: str = "big") -> int:
    if at + count > len(content):
        raise IndexError(at)
    return int.from_bytes(content[at : at + count], "little" if order == "little" else "big")


def _png(content: bytes) -> Size:
    if content[12:16] != b"IHDR":
        raise NotAnImageError("a PNG without a header")
    width, height = _number(content, 16, 4), _number(content, 20, 4)
    frames, at = 1, 8
    # An animation states its frames before the first data.
    while at + 8 <= len(content) and content[at + 4 : at + 8] != b"IDAT":
        if content[at + 4 : at + 8] == b"acTL":
            frames = _number(content, at + 8, 4)
        at += 12 + _number(content, at, 4)
    return Size("image/png", width, height, frames)


_NO_LENGTH = frozenset({0x01, *range(0xD0, 0xD8)})
_FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def _jpeg(content: bytes) -> Size:
    at = 2
    while True:
        if content[at] != 0xFF:
            raise NotAnImageError("a JPEG whose parts are broken")
        while content[at] == 0xFF:
            at += 1
        marker = content[at]
        at += 1
        if marker in _NO_LENGTH:
            continue
        if marker in _FRAME_HEADERS:
            height, width = _number(content, at + 3, 2), _number(content, at + 5, 2)
            return Size("image/jpeg", width, height, 1)
        if marker in (0xD9, 0xDA):
            raise NotAnImageError("a JPEG without a size")
        at += max(_number(content, at, 2), 2)


def _webp(content: bytes, max_frames: int) -> Size:
    kind = content[12:16]
    if kind == b"VP8 ":
        if content[23:26] != b"\x9d\x01\x2a":
            raise NotAnImageError("a WebP without a start code")
        width, height = (_number(content, at, 2, "little") & 0x3FFF for at in (26, 28))
        return Size("image/webp", width, height, 1)
    if kind == b"VP8L":
        if content[20] != 0x2F:
            raise NotAnImageError("a WebP without a signature")
        bits = _number(content, 21, 4, "little")
        return Size("image/webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1)
    if kind != b"VP8X":
        raise NotAnImageError("a WebP of an unknown kind")
    width, height = (_number(content, at, 3, "little") + 1 for at in (24, 27))
    frames, at = 0, 12
    while at + 8 <= len(content) and frames <= max_frames:
        frames += content[at : at + 4] == b"ANMF"
        length = _number(content, at + 4, 4, "little")
        at += 8 + length + length % 2
    return Size("image/webp", width, height, max(frames, 1))


def _gif(content: bytes, max_frames: int) -> Size:
    width, height = _number(content, 6, 2, "little"), _number(content, 8, 2, "little")
    at = 13 + _colours(content[10])
    frames = 0
    while at < len(content) and content[at] != 0x3B and frames <= max_frames:
        if content[at] == 0x21:
            at += 2
        elif content[at] == 0x2C:
            frames += 1
            # A frame may be larger than the screen that it is shown on.
            width = max(width, _number(content, at + 5, 2, "little"))
            height = max(height, _number(content, at + 7, 2, "little"))
            at += 11 + _colours(content[at + 9])
        else:
            raise NotAnImageError("a GIF whose blocks are broken")
        while content[at]:
            at += 1 + content[at]
        at += 1
    return Size("image/gif", width, height, frames)


def _colours(flags: int) -> int:
    """Bytes of the table of colours that follows."""
    return 3 * 2 ** ((flags & 7) + 1) if flags & 0x80 else 0
