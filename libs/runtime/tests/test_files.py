import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treadle_runtime.files import LockHeldError, hold_lock, is_locked, write_durably
from treadle_runtime.tracker import JsonlTracker


def test_a_durable_write_replaces_whole_files_and_leaves_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "latest"
    write_durably(target, b"one")
    write_durably(target, b"two")

    assert target.read_bytes() == b"two"
    assert list(tmp_path.iterdir()) == [target]


def test_a_lock_is_held_by_one(tmp_path: Path) -> None:
    assert not is_locked(tmp_path / "lock")
    assert not (tmp_path / "lock").exists()

    hold_lock(tmp_path / "lock")

    assert is_locked(tmp_path / "lock")

    with pytest.raises(LockHeldError, match="lock is held"):
        hold_lock(tmp_path / "lock")


def test_who_only_looks_keeps_nobody_from_a_lock(tmp_path: Path) -> None:
    looking = (tmp_path / "lock").open("w")
    fcntl.flock(looking, fcntl.LOCK_SH)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(hold_lock, tmp_path / "lock")
        with pytest.raises(TimeoutError):
            taking.result(0.05)
        looking.close()
        os.close(taking.result(20))


def test_the_tracker_keeps_one_object_a_line(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics" / "trainer.jsonl")
    tracker.log("step", {"step": 1, "reward": 0.5})
    tracker.log("step", {"step": 2, "reward": 0.75})

    lines = (tmp_path / "metrics/trainer.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["name"], row["step"], row["reward"]) for row in rows] == [
        ("step", 1, 0.5),
        ("step", 2, 0.75),
    ]
