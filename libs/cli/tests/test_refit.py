"""What `treadle refit show` reads out of a run's directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from treadle_cli import compose, refit
from treadle_runtime.config import BAD_CONFIGURATION
from treadle_runtime.tracker import JsonlTracker

RECIPE = {
    "run": {"dir": "run", "model": "policy"},
    "experience": {"steps": 4},
    "refit": {"transport": {"name": "gloo", "port": 29511}},
}
VERSION: dict[str, Any] = {
    "version": 2,
    "step": 1,
    "members": 2,
    "left_behind": 0,
    "aliased": 0,
    "bytes": 64_000_000,
    "open_s": 0.001,
    "fill_s": 0.25,
    "verify_s": 0.5,
    "commit_s": 0.002,
    "total_s": 0.753,
    "trace_id": "",
}
PLAN = {"version": 2, "tensors": 16, "copies": 20, "bytes": 64_000_000}
PLAN |= {"engine": "e1", "source_ranks": 1, "target_ranks": 2}
ENGINE: dict[str, Any] = {"version": 2, "bytes": 64_000_000, "aliased": 0, "load_s": 0.4}
ENGINE |= {"wire_s": 0.2, "place_s": 0.05, "verify_s": 0.15, "install_s": 0.03}
ENGINE |= {"wire_bytes": 1_000_000, "launches": 4, "encoding": "delta", "group_epoch": 3}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    plan = compose.Plan("run-1", directory, tmp_path / "policy", {}, {}, 60.0)
    compose.write(plan, RECIPE)
    return directory


def log(directory: Path, writer: str, name: str, values: dict[str, Any]) -> None:
    JsonlTracker(directory / "metrics" / f"{writer}.jsonl").log(name, values)


def test_the_newest_version_and_where_its_time_went(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(run, "refit", "version", VERSION | {"version": 1, "open_s": 9.0})
    log(run, "rollout", "version", ENGINE | {"version": 1, "wire_s": 9.0})
    log(run, "refit", "plan", PLAN)
    log(run, "refit", "version", VERSION)
    log(run, "rollout", "version", ENGINE)
    log(run, "rollout", "version", ENGINE | {"wire_s": 0.3, "install_s": 0.01})

    assert refit.main(["show", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    assert found["seconds"] == {
        "announce": 0.001,
        "gather": 0.25,
        "wire": 0.3,
        "load": 0.05,
        "verify": 0.15,
        "pause": 0.03,
    }
    assert tuple(found["seconds"]) == refit.PARTS
    assert found["plan"]["copies"] == 20
    assert found["transport"] == "gloo"
    assert refit.main(["show", str(run)]) == 0
    text = capsys.readouterr().out
    assert "version 2 of step 1: 2 engines verified it" in text
    assert "plan: 20 copies of 16 tensors, 1 to 2 ranks, 64.0 MB" in text
    assert "delta, 1.0 MB in 4 launches, group epoch 3" in text
    assert "pause" in text


def test_rows_of_engines_that_said_less_are_read_too(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(run, "refit", "version", VERSION)
    log(run, "rollout", "version", {"version": 2, "load_s": 0.4, "install_s": 0.03})

    assert refit.main(["show", str(run), "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["seconds"]["wire"], found["seconds"]["pause"]) == (0.0, 0.03)
    assert found["plan"] is None


def test_a_run_without_a_version_and_a_folder_without_a_run_are_said(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refit.main(["show", str(run)]) == BAD_CONFIGURATION
    assert "expected a run that committed a version" in capsys.readouterr().err
    assert refit.main(["show", str(tmp_path / "no")]) == BAD_CONFIGURATION
