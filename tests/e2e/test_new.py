"""A project of `treadle new` runs as it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

QUICK = (
    "experience.steps=3",
    "experience.tasks_per_step=4",
    "experience.evaluation=null",
    "rollout.slots=16",
)


def done(directory: Path, *words: str) -> str:
    """What a command printed that ended well."""
    ended = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_new_project_passes_its_test_makes_its_policy_and_trains(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    done(tmp_path, "treadle_cli.main", "new", str(project))

    assert "9 passed" in done(project, "pytest", "-q", "-p", "no:cacheprovider")
    done(project, "treadle_cli.main", "sft", "warmup.yaml", "steps=1")
    done(project, "treadle_cli.main", "train", "recipe.yaml", *QUICK)

    rows = (project / "runs/first/metrics/trainer.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, rows) if row["name"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["num_episodes"] == 4 * 8 for row in steps)
