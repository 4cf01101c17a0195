import json

import pytest

from treadle_runtime.measures import Measure, report


@pytest.mark.parametrize(
    ("goal", "value", "holds"),
    [
        ("none", -1.0, True),
        (">= 0.9", 0.9, True),
        (">= 0.9", 0.8999, False),
        ("<= 2", 2, True),
        ("< 2", 2, False),
        ("> 2", 2, False),
        ("== 0", 0, True),
        ("== 0", 1, False),
        (">= 0", float("nan"), False),
    ],
)
def test_a_measure_holds_where_its_goal_is_met(goal, value, holds):
    assert Measure("m", value, "ratio", goal).holds is holds


def test_a_report_is_a_line_a_measure_and_fails_where_one_does_not_hold(capsys):
    kept = Measure("kept", 1 / 3, "ratio", details={"load": 0.5})
    missed = Measure("missed", 1, "episodes", "== 0")
    assert report([kept]) == 0
    assert report([missed, kept]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == {
        "measure": "kept",
        "value": 0.3333,
        "unit": "ratio",
        "goal": "none",
        "holds": True,
        "load": 0.5,
    }
    assert [line["holds"] for line in lines] == [True, False, True]
