"""A project of `treadle new` runs as it is."""

import json
from pathlib import Path

import pytest
from e2e_harness import python, treadle

pytestmark = pytest.mark.e2e

QUICK = (
    "experience.steps=3",
    "experience.tasks_per_step=4",
    "experience.evaluation=null",
    "rollout.slots=16",
)


def test_a_new_project_passes_its_test_makes_its_policy_and_trains(tmp_path: Path) -> None:
    project = tmp_path / "mine"
    treadle("new", str(project))

    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "9 passed" in python(*tests, cwd=project).stdout
    treadle("sft", "warmup.yaml", "steps=1", cwd=project)
    treadle("train", "recipe.yaml", *QUICK, cwd=project)

    rows = (project / "runs/first/metrics/trainer.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, rows) if row["name"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["num_episodes"] == 4 * 8 for row in steps)
