import json
import resource
import signal
from pathlib import Path

import pytest

from treadle_runtime.tracker import JsonlTracker


def test_a_row_without_room_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    JsonlTracker(Path("/dev/full")).log("counts", {"position": 1})

    assert "no room for a row of numbers: counts" in caplog.text


def test_half_a_row_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tracker = JsonlTracker(path)
    tracker.log("counts", {"position": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limits[1]))
    try:
        tracker.log("counts", {"position": 2})
        tracker.log("counts", {"position": 3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    tracker.log("counts", {"position": 4})

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["position"] for row in rows] == [1, 4]
