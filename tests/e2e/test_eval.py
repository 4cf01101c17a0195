"""Scoring a policy on its own, and what `treadle status` says of it, as a user sees them."""

import json
from pathlib import Path

import pytest
from e2e_harness import RECIPE, treadle

pytestmark = pytest.mark.e2e

TASKS = "{name: 'examples/calculator/tasks.py:CalculatorTasks', split: heldout, seed: 1}"
SETS = f"[{{name: few, source: {TASKS}, limit: 12, sampling: {{temperature: 0, max_tokens: 14}}}}]"


def test_a_policy_is_scored_without_training_and_the_run_says_so(tmp_path: Path) -> None:
    overrides = (f"run.dir={tmp_path / 'run'}", f"experience.evaluation.sets={SETS}")

    scored = treadle("eval", RECIPE, *overrides)
    told = treadle("status", str(tmp_path / "run"), "--json")

    score, failed = map(json.loads, scored.stdout.splitlines())
    assert (score["measure"], score["num_scored"]) == ("heldout_few", 12)
    assert 0 <= score["value"] <= 1
    assert score["std_error"] >= 0
    assert (failed["measure"], failed["value"], failed["holds"]) == ("heldout_few_failed", 0, True)
    assert "held-out few" in scored.stderr
    status = json.loads(told.stdout)
    assert (status["phase"], status["running"], status["step"]) == ("complete", False, 0)
    assert status["scores"]["few"]["score"] == pytest.approx(score["value"], abs=1e-4)
    assert status["warnings"] == []
