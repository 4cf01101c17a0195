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
