"""What a run's directory says of its run: `run.json`, written when the run begins."""

import json
from pathlib import Path
from typing import Any, cast

from treadle_core.errors import InvalidFieldError

FILE_NAME = "run.json"


def read(directory: Path) -> dict[str, Any]:
    """The `id` and `recipe` of a run, and where they were kept `model` and `started_in`.

    Raises InvalidFieldError where no run lies, or its record is torn.
    """
    try:
        found: Any = json.loads((directory / FILE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not {"id", "recipe"} <= found.keys():
        limit = f"a directory with a whole {FILE_NAME}, as `treadle train` makes it"
        raise InvalidFieldError("run", limit=limit, value=directory)
    return cast("dict[str, Any]", found)
