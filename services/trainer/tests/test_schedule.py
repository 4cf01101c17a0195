import pytest

from treadle_trainer.core.schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        pytest.param(Schedule(1.0), [1, 1, 1, 1, 1, 1], id="constant"),
        pytest.param(Schedule(1.0, 4), [0.25, 0.5, 0.75, 1, 1, 1], id="warm-up"),
        pytest.param(Schedule(1.0, 2, 4, 0.1), [0.5, 1, 1, 1, 0.1, 0.1], id="one-drop"),
        pytest.param(Schedule(1.0, 0, 6, 0.1), [1, 1, 1, 1, 1, 1], id="drop-at-the-end"),
    ],
)
def test_learning_rate_by_step(schedule, rates):
    assert [schedule(step) for step in range(1, 7)] == pytest.approx(rates)
