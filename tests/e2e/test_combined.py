"""The settings that bend the loop, all at once."""

import pytest

pytestmark = pytest.mark.e2e

HELD_OUT = '{name: "examples/calculator/tasks.py:CalculatorTasks", split: heldout, seed: 1}'
SIZE = 16


def evaluation_set(name: str, *, exact: bool) -> str:
    settings = f"limit: {SIZE}, exact: {exact}, sampling: {{temperature: 1.0, max_tokens: 14}}"
    return f"{{name: {name}, source: {HELD_OUT}, {settings}}}"


def test_a_run_with_every_setting_that_bends_the_loop_ends_and_adds_up(make_run) -> None:
    sets = [evaluation_set("exact", exact=True), evaluation_set("mixed", exact=False)]
    run = make_run(
        "experience.steps=7",
        "experience.window=adaptive",
        "experience.overdue=late",
        "experience.max_overdue_lag=6",
        "experience.min_episodes=3",
        "experience.filter.name=zero_variance",
        "experience.evaluation.every=4",
        f"experience.evaluation.sets=[{', '.join(sets)}]",
        "trainer.publish_every=2",
        *(f"{section}.transport.name=files" for section in ("trainer", "refit", "rollout")),
    )
    run.start()
    run.finish()

    steps = run.rows("trainer", "step")
    assert [row["step"] for row in steps] == list(range(1, 8))
    assert [row["step"] for row in steps if "version" in row] == [2, 4, 6, 7]
    assert max(row["lag_max"] for row in steps) <= 6
    counted = run.fsck()
    assert 7 * 4 * 3 <= counted["consumed"] <= 7 * 4 * 4
    assert (counted["lost"], counted["trained_twice"], counted["pending"]) == (0, 0, 0)
    assert run.rows("experience", "counts")[-1]["reason_zero_variance"] > 0

    scores = {(row["evaluation"], row["step"]): row for row in run.rows("experience", "evaluation")}
    assert set(scores) == {(name, step) for name in ("exact", "mixed") for step in (0, 4, 7)}
    for (name, step), row in scores.items():
        assert row["num_scored"] + row["num_failed"] == SIZE
        if name == "exact" and row["num_scored"]:
            assert row["oldest_version"] == row["newest_version"]
        if step != 4:  # nothing comes after the last step, and the first one is waited for
            assert row["num_failed"] == 0
