"""An image with its bytes: measured by its header, never decoded here."""

from dataclasses import dataclass, field

from treadle_agents.images.headers import NotAnImageError, measured
from treadle_core.media import MAX_MEDIUM_BYTES, Medium

MAX_PIXELS = 32 * 1024 * 1024
"""Width times height of one frame."""
MAX_FRAMES = 8


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Picture:
    """An image with its bytes; make one with `of`."""

    medium: Medium
    data: bytes = field(repr=False)
    width: int
    height: int
    """Pixels."""

    @classmethod
    def of(cls, data: bytes) -> "Picture":
        """The image that `data` is. Raises NotAnImageError, also where it is over a limit."""
        if len(data) > MAX_MEDIUM_BYTES:
            raise NotAnImageError(f"expected at most {MAX_MEDIUM_BYTES} bytes, got {len(data)}")
        size = measured(data, max_frames=MAX_FRAMES)
        if size.width * size.height > MAX_PIXELS:
            found = f"{size.width} x {size.height}"
            raise NotAnImageError(f"expected at most {MAX_PIXELS} pixels, not {found}")
        if size.frames > MAX_FRAMES:
            raise NotAnImageError(f"expected at most {MAX_FRAMES} frames, not more")
        return cls(Medium.of(data, size.kind), data, size.width, size.height)
