"""A wrong recipe is told before anything starts."""

import pytest
from e2e_harness import RECIPE, treadle


def refused(*overrides: str) -> str:
    return treadle("train", RECIPE, *overrides, status=2).stderr


def test_all_problems_are_told_at_once(tmp_path) -> None:
    told = refused(
        f"run.dir={tmp_path}/run",
        "experience.max_lagg=1",
        "rollout.engine.max_contxt=8",
        "trainer.optimizer.learning_rate=fast",
        "trainr.steps=1",
        "run.model=no/such/folder",
    )

    assert "unknown key experience.max_lagg; did you mean experience.max_lag" in told
    assert "max_contxt" in told
    assert "did you mean max_context" in told
    assert "trainer.optimizer.learning_rate" in told
    assert "unknown key trainr; did you mean trainer" in told
    assert "run.model: no Hugging Face folder" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        pytest.param("experience.steps=-1", "experience.steps", id="no-steps"),
        pytest.param("experience.deadline_s=null", "experience.deadline_s", id="no-deadline"),
        pytest.param("experience.max_lag=-1", "experience.max_lag", id="negative-lag"),
        pytest.param("rollout.slots=0", "rollout.slots", id="no-slots"),
        pytest.param("rollout.engine.name=transformer", "did you mean transformers", id="engine"),
        pytest.param("trainer.loss.name=ppo_clop", "did you mean ppo_clip", id="loss"),
    ],
)
def test_a_value_out_of_range_is_named(tmp_path, override: str, told: str) -> None:
    assert told in refused(f"run.dir={tmp_path}/run", override)


def test_a_run_directory_keeps_its_recipe(tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text('{"id": "run-1", "recipe": {"run": {"seed": 1}}}')

    told = refused(f"run.dir={run}")

    assert "run.seed" in told
    assert "--allow-change run.seed" in told
