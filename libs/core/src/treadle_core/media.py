"""Media: what a policy is shown beside its tokens, by content, and where its tokens show it.

Shapes: T = tokens of one segment.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from treadle_core.errors import InvalidFieldError
from treadle_core.ids import checked_sha256

if TYPE_CHECKING:  # an agent's own Python may lack numpy
    import numpy as np
    from numpy.typing import NDArray

MAX_MEDIA = 256
"""Most media of one episode."""

MAX_MEDIUM_BYTES = 20 * 1024 * 1024

MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")


@dataclass(frozen=True, slots=True)
class Medium:
    """Names an image by its content. Construction raises InvalidFieldError on a bad one."""

    sha256: str
    """Of the bytes, 64 lower-case hex digits."""
    size: int
    """Length of the bytes, 1 to MAX_MEDIUM_BYTES."""
    media_type: str
    """One of MEDIA_TYPES."""
    node: str = ""
    """Address of the sidecar that holds the bytes; empty: the run's own store does."""
    epoch: int = 0
    """Life of that sidecar in which they were uploaded."""

    def __post_init__(self) -> None:
        """Checks all but the node, which a store does."""
        checked_sha256(self.sha256)
        if not 1 <= self.size <= MAX_MEDIUM_BYTES:
            raise InvalidFieldError("size", limit=f"1 to {MAX_MEDIUM_BYTES} bytes", value=self.size)
        if self.media_type not in MEDIA_TYPES:
            value = repr(self.media_type[:80])
            raise InvalidFieldError("media_type", limit=", ".join(MEDIA_TYPES), value=value)
        if self.epoch < 0:
            raise InvalidFieldError("epoch", limit=">= 0", value=self.epoch)

    @classmethod
    def of(cls, data: bytes, media_type: str) -> "Medium":
        """The medium whose bytes are `data`; it lies nowhere yet."""
        return cls(hashlib.sha256(data).hexdigest(), len(data), media_type)


@dataclass(frozen=True, slots=True)
class MediumSpan:
    """The run of placeholder tokens that shows a medium."""

    sha256: str
    """Of the medium's bytes."""
    start: int
    """First token, from 0."""
    length: int
    """Tokens, at least 1."""

    def __post_init__(self) -> None:
        """Raises InvalidFieldError on what no segment can hold."""
        checked_sha256(self.sha256)
        if self.start < 0:
            raise InvalidFieldError("start", limit=">= 0", value=self.start)
        if self.length < 1:
            raise InvalidFieldError("length", limit=">= 1", value=self.length)

    @property
    def end(self) -> int:
        """The token after its last."""
        return self.start + self.length


def check_spans(spans: Sequence[MediumSpan], sampled: "NDArray[np.bool_]") -> None:
    """Raises InvalidFieldError unless spans ascend, lie inside T, and cover no token of `sampled`.

    `sampled` is [T]; the field is named for example `media[1].start`.
    """
    for index, (before, span) in enumerate(pairwise(spans), 1):
        if span.start < before.end:
            limit = f">= {before.end}, the end of the span before"
            raise InvalidFieldError(f"media[{index}].start", limit=limit, value=span.start)
    for index, span in enumerate(spans):
        if span.end > sampled.size:
            limit = f"an end within {sampled.size} tokens"
            raise InvalidFieldError(f"media[{index}].length", limit=limit, value=span.length)
        if sampled[span.start : span.end].any():
            value = f"{span.start} to {span.end}"
            limit = "no token that the policy sampled"
            raise InvalidFieldError(f"media[{index}]", limit=limit, value=value)


def check_media(media: Sequence[Medium], shown: Sequence[Iterable[MediumSpan]]) -> None:
    """Raises InvalidFieldError unless `media` are what `shown` says, each content once.

    `shown` has the spans of each segment; the field is named for example `media[1].sha256` or
    `segments[0].media[2].sha256`.
    """
    if len(media) > MAX_MEDIA:
        raise InvalidFieldError("media", limit=f"at most {MAX_MEDIA} entries", value=len(media))
    named = {span.sha256 for spans in shown for span in spans}
    known: set[str] = set()
    for index, medium in enumerate(media):
        if medium.sha256 in known or medium.sha256 not in named:
            limit = "once" if medium.sha256 in known else "a medium that a segment shows"
            raise InvalidFieldError(f"media[{index}].sha256", limit=limit, value=medium.sha256)
        known.add(medium.sha256)
    for place, spans in enumerate(shown):
        for index, span in enumerate(spans):
            if span.sha256 not in known:
                field = f"segments[{place}].media[{index}].sha256"
                raise InvalidFieldError(field, limit="one of media", value=span.sha256)
