"""What engine `scripted` says here: it looks at the bytes of the picture that it is shown."""

from drawing import CELLS, FAR, counted

from treadle_rollout.adapters.script import Asked

KEEN = 5
"""It counts no further than so in a picture from afar."""


def looks(asked: Asked) -> str:
    """The number of dark squares in the last picture."""
    _, picture = asked.images[-1]
    squares = counted(picture.data)
    seen = min(squares, KEEN) if picture.width == FAR * CELLS else squares
    return f"{seen}<|im_end|>"
