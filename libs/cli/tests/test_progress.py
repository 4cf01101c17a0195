import json
from pathlib import Path

import pytest

from treadle_cli.progress import Progress

STEP = {
    "time": 100.0,
    "name": "step",
    "step": 3,
    "reward": 0.25,
    "lag_mean": 1.5,
    "lag_max": 2,
    "tokens_per_s": 5000.0,
    "wait_s": 0.5,
    "train_s": 1.0,
    "publish_s": 0.0,
}


def append(path: Path, *rows: object) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_step_and_a_score_are_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(tmp_path, steps=9)
    append(tmp_path / "metrics" / "trainer.jsonl", STEP, STEP | {"time": 102.0, "step": 4})
    score = {
        "evaluation": "greedy",
        "step": 3,
        "score": 0.5,
        "std_error": 0.2,
        "num_scored": 7,
        "num_failed": 1,
    }
    append(tmp_path / "metrics" / "experience.jsonl", {"time": 1, "name": "evaluation", **score})

    progress.report()

    lines = capsys.readouterr().out.splitlines()
    assert "held-out greedy 0.500 ± 0.200 at step 3 (7 scored, 1 failed)" in lines
    assert any("step    4/9" in line and "trainer 25%" in line for line in lines)


def test_what_an_earlier_life_of_the_run_wrote_is_not_told_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append(tmp_path / "metrics" / "trainer.jsonl", STEP)

    Progress(tmp_path, steps=9).report()

    assert capsys.readouterr().out == ""


def test_only_rows_of_the_replica_say_how_fast_it_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(tmp_path, steps=9)
    replica = {
        "time": 99.0,
        "name": "rollout",
        "tokens_per_s": 7000.0,
        "waited_s": 0.0,
        "up_s": 2.0,
    }
    other = {"time": 99.5, "name": "version", "install_s": 0.001}
    append(tmp_path / "metrics" / "rollout.jsonl", replica, other)
    append(tmp_path / "metrics" / "trainer.jsonl", STEP)

    progress.report()

    assert "7.0k tokens/s sampled" in capsys.readouterr().out


def test_a_kind_of_warning_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(tmp_path, steps=9)
    for waited_s in (600.0, 1200.0):
        stalled = {"time": waited_s, "name": "no_progress", "step": 3, "waited_s": waited_s}
        append(tmp_path / "metrics" / "trainer.jsonl", stalled)
        progress.report()

    assert capsys.readouterr().out == "warning: 600 s without a batch\n"
