"""The promises about images: shown as long as the engine says, or refused by name."""

import struct
import zlib
from dataclasses import replace

import numpy as np

from treadle_agents.images.picture import Picture
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan
from treadle_rollout.conformance.subject import (
    Check,
    Subject,
    check_shapes,
    raises,
    request,
    require,
    serving,
)
from treadle_rollout.core.errors import UnsupportedImageError

_CONTEXT = 2048
_WIDTH, _HEIGHT = 40, 30


def _picture() -> Picture:
    """A black PNG."""
    header = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, 8, 0, 0, 0, 0)
    data = zlib.compress(bytes((_WIDTH + 1) * _HEIGHT))
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    written = (
        struct.pack(">I", len(said)) + kind + said + struct.pack(">I", zlib.crc32(kind + said))
        for kind, said in chunks
    )
    return Picture.of(b"\x89PNG\r\n\x1a\n" + b"".join(written))


async def an_image_is_shown_as_long_as_the_engine_says_or_refused(subject: Subject) -> None:
    """An engine without images refuses them; one with them refuses what is not as it says."""
    picture = _picture()
    name = picture.medium.sha256
    async with serving(subject, slots=1, max_context=_CONTEXT) as engine:
        rule = engine.images
        size = 1 if rule is None else rule.tokens_of(_WIDTH, _HEIGHT)
        asked = replace(
            request("s", np.ones(size + 2, np.int32), 2),
            media=(MediumSpan(name, 1, size),),
            pictures={name: picture},
        )
        if rule is None:
            await raises(UnsupportedImageError, engine.generate(asked))
            return
        check_shapes(await engine.generate(asked))
        for wrong, field in (
            (replace(asked, pictures={}), "media[0].sha256"),
            (replace(asked, media=(MediumSpan(name, 1, size + 1),)), "media[0].length"),
            (replace(asked, media=(MediumSpan(name, 3, size),)), "media[0].length"),
        ):
            error = await raises(InvalidFieldError, engine.generate(wrong))
            require(error.field == field, f"{field} is named")


CHECKS: tuple[Check, ...] = (an_image_is_shown_as_long_as_the_engine_says_or_refused,)
