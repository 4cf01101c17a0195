"""What `treadle status` reads out of a run's directory."""

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from treadle_cli import compose, evaluate, status
from treadle_runtime.config import BAD_CONFIGURATION, merge, parse_overrides, read_yaml
from treadle_runtime.files import hold_lock
from treadle_runtime.tracker import JsonlTracker

RECIPE = {"run": {"dir": "run", "model": "policy"}, "experience": {"steps": 4}}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that trained two of its four steps."""
    directory = tmp_path / "run"
    services = {"experience": {"steps": 4, "listen": f"unix:{tmp_path}/sockets/experience.sock"}}
    plan = compose.Plan("run-1", directory, tmp_path / "policy", services, {}, 60.0)
    compose.write(plan, RECIPE)
    (directory / "checkpoints" / "step-000002").mkdir(parents=True)
    (directory / "checkpoints" / "step-000002" / "model.safetensors").write_bytes(b"0" * 1000)
    log(directory, "supervisor", "start", service="trainer", pid=os.getpid(), restarts=0)
    values = {"reward": 0.5, "lag_mean": 1.0, "lag_max": 2, "tokens_per_s": 5300.0}
    values |= {"wait_s": 1.0, "train_s": 1.0, "publish_s": 0.0}
    for step in (1, 2):
        log(directory, "trainer", "step", step=step, **values)
    return directory


def log(directory: Path, writer: str, name: str, **values: Any) -> None:
    JsonlTracker(directory / "metrics" / f"{writer}.jsonl").log(name, values)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert status.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_whose_lock_is_held_goes_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = hold_lock(run / "lock")

    found = said(capsys, str(run))
    os.close(lock)

    assert (found["running"], found["step"], found["steps"]) == (True, 2, 4)
    assert (found["reward"], found["lag_max"], found["trained_tokens_per_s"]) == (0.5, 2, 5300)
    assert found["left_s"] >= 0
    assert found["next"] == "It goes on by itself."
    assert not said(capsys, str(run))["running"]


def test_a_killed_run_is_gone_on_with_where_it_was_started(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path.cwd()
    monkeypatch.chdir(run)

    found = said(capsys, ".")

    assert (found["phase"], found["running"], found["left_s"]) == ("killed", False, None)
    recipe = shlex.quote(str(run / "recipe.yaml"))
    assert found["next"] == f"Go on with: cd {shlex.quote(str(home))} && treadle train {recipe}"
    assert found["disk_bytes"]["checkpoints"] == 1000
    assert not found["services"]["trainer"]["alive"]  # the process is this test


def test_a_complete_run_says_how_to_score_its_newest_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log(run, "supervisor", "end", status=0)

    found = said(capsys, str(run))

    assert found["phase"] == "complete"
    assert found["checkpoint"] == str(run / "checkpoints" / "step-000002")
    assert found["next"].endswith(f"run.model={run / 'checkpoints' / 'step-000002'}")


def test_a_run_that_gave_up_says_the_last_words_of_what_died(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"signal": "", "status": 3, "memory_kill": "no", "last_line": "no valid checkpoint"}
    log(run, "supervisor", "death", service="trainer", pid=7, **values)
    log(run, "supervisor", "end", status=1)

    assert said(capsys, str(run))["phase"] == "failed"
    assert status.main([str(run)]) == 0
    text = capsys.readouterr().out
    assert "trainer ended with status 3, and is down; its last line: no valid checkpoint" in text
    assert "Go on with: " in text


def test_text_and_json_say_the_same_of_a_run_without_rows(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (run / "metrics").iterdir():
        path.unlink()

    assert said(capsys, str(run))["phase"] == "not started"
    assert status.main([str(run)]) == 0
    assert "not started" in capsys.readouterr().out


def test_a_run_that_does_not_say_where_it_was_started_goes_on_here(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = json.loads((run / "run.json").read_text())
    del kept["started_in"]
    (run / "run.json").write_text(json.dumps(kept))

    assert said(capsys, str(run))["next"].startswith("Go on with: treadle train ")


@pytest.mark.parametrize("content", [None, "{", "[]", "{}"], ids=["none", "torn", "list", "empty"])
def test_a_directory_that_is_no_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)

    assert status.main([str(tmp_path)]) == BAD_CONFIGURATION
    assert capsys.readouterr().err.endswith(f"as `treadle train` makes it, got {tmp_path}\n")


def test_the_recipe_that_a_run_keeps_is_the_runs(run: Path) -> None:
    assert read_yaml(run / compose.RECIPE) == RECIPE


def test_an_evaluation_needs_sets_to_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("run: 3\nexperience: {steps: 4}\n")

    assert evaluate.main([str(path)]) == BAD_CONFIGURATION
    assert "experience.evaluation: required" in capsys.readouterr().err


def test_an_evaluation_has_a_directory_of_its_own_unless_one_is_named() -> None:
    def directory(*overrides: str) -> str:
        recipe = {"run": {"dir": "runs/x"}, "experience": {"steps": 4, "evaluation": {"every": 1}}}
        merge(recipe, parse_overrides(overrides))
        evaluate.score_only(recipe, overrides=list(overrides))
        assert recipe["experience"]["steps"] == 0
        return recipe["run"]["dir"]

    assert directory().startswith("runs/eval-")
    assert directory("run.model=policy").startswith("runs/eval-")
    assert directory("run.dir=mine") == directory("run={dir: mine}") == "mine"
