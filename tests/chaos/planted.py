"""Planting faults in processes that are started: what their environment has to say."""

import json
import os
from pathlib import Path

FOLDER = Path(__file__).parent / "planting"


def planted(*faults: dict[str, str]) -> dict[str, str]:
    """Environment with these faults, beside those that are planted already.

    Each is a `module` whose text is to read `after` where it reads `before`.
    """
    before = json.loads(os.environ.get("TREADLE_PLANTED", "[]"))
    path = [str(FOLDER), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "TREADLE_PLANTED": json.dumps([*before, *faults]),
    }
