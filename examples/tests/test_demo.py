import json
import sys
from pathlib import Path

import pytest

from treadle_runtime import plugins

DEMO = Path(__file__).parents[1] / "calculator" / "demo.py"


@pytest.fixture
def demo():
    plugins.load("treadle.none", f"{DEMO}:main")
    (module,) = [m for m in sys.modules.values() if getattr(m, "__file__", None) == str(DEMO)]
    return module


@pytest.mark.parametrize(
    ("goal", "value", "holds"),
    [
        pytest.param("<0.1", 0.09, True, id="below"),
        pytest.param("<0.1", 0.1, False, id="not-below"),
        pytest.param("<=90", 90.0, True, id="at-most"),
        pytest.param("<=90", 90.1, False, id="more"),
        pytest.param(">=0.93", 0.93, True, id="at-least"),
        pytest.param(">=0.93", 0.92, False, id="less"),
        pytest.param("none", 0.2, True, id="no-goal"),
    ],
)
def test_a_measure_says_whether_its_goal_is_kept(demo, goal, value, holds) -> None:
    row = json.loads(demo.Measure("accuracy", value, "share", goal).line())

    assert row["holds"] is holds


def test_rl_seconds_count_from_the_first_claim_to_the_last_step(demo, tmp_path, monkeypatch):
    (tmp_path / "metrics").mkdir()
    scores = [
        {"name": "evaluation", "evaluation": name, "step": step, "score": 0.5}
        for name in ("greedy", "sampled")
        for step in (0, 2)
    ]
    times = {"wait_s": 4.0, "train_s": 1.0, "publish_s": 0.5}
    steps = [{"name": "step", "step": n, "time": 100.0 + n, **times} for n in (1, 2)]
    for service, rows in (("experience", scores), ("trainer", steps)):
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (tmp_path / "metrics" / f"{service}.jsonl").write_text(lines)
    monkeypatch.setattr(demo, "RUN", tmp_path)

    measures = {each.measure: each for each in demo.measure(began=0.0)}

    assert measures["rl_seconds"].value == pytest.approx(102.0 - (101.0 - 5.5))
    assert not measures["heldout_greedy_after"].holds


def test_the_pairs_shown_cover_every_number_of_calls_and_a_mistake(demo) -> None:
    def said(expression: str, *, right: bool):
        return demo.Transcript(expression, "", right=right)

    after = [
        said("11+22", right=True),
        said("33+44", right=True),
        said("11-22+33", right=False),
        said("11-22-33-44", right=True),
        said("55+66", right=False),
    ]

    shown = [new for _, new in demo.chosen(after, after)]

    assert shown == [after[0], after[2], after[3], after[4]]
