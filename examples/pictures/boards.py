"""Boards with dark squares: how many are there?"""

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from drawing import CELLS, FAR, drawn

from treadle_core.tickets import Json


@dataclass(frozen=True, slots=True)
class Boards:
    """Endless TaskSource; the same cursor gives the same task."""

    def read(self, cursor: int) -> Mapping[str, Json]:
        """Task `cursor`, from 0: `prompt` with a marker, `images` in base64, and `squares`."""
        squares = 1 + cursor * 5 % CELLS**2
        image = base64.b64encode(drawn(squares, FAR)).decode()
        return {"prompt": "<image>How many are dark?", "images": [image], "squares": squares}
