"""What a recipe may say, and how it is told what is wrong."""

import pytest
import yaml
from pydantic import ValidationError

from treadle_experience.config import ExperienceConfig
from treadle_runtime.config import problems

RECIPE = """
run: {id: run-1, dir: runs/x, model: policy}
listen: unix:/tmp/experience
steps: 60
tasks_per_step: 16
group_size: 8
max_lag: 4
retries: 2
deadline_s: 60
lease_s: 10
sampling: {temperature: 1.0, max_tokens: 14}
source: {name: jsonl, path: tasks.jsonl}
evaluation:
  every: 20
  share: 0.25
  sets:
    - name: greedy
      source: {name: jsonl, path: held.jsonl}
      limit: 256
      sampling: {temperature: 0, max_tokens: 14}
    - name: sampled
      source: {name: jsonl, path: held.jsonl}
      limit: 256
      sampling: {temperature: 1, max_tokens: 14}
"""


def read(**changes) -> ExperienceConfig:
    values = {**yaml.safe_load(RECIPE), **changes}
    return ExperienceConfig.model_validate({k: v for k, v in values.items() if v is not ...})


def test_the_recipe_of_the_demo_becomes_rules() -> None:
    rules = read().rules()

    assert (rules.run_id, rules.bound, rules.retries) == ("run-1", 80, 2)
    assert [(s.name, s.limit, s.sampling.temperature) for s in rules.evaluation.sets] == [
        ("greedy", 256, 0.0),
        ("sampled", 256, 1.0),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"deadline_s": ...}, "deadline_s: required", id="deadline-required"),
        pytest.param({"steps": -1}, "steps: ", id="steps"),
        pytest.param({"tasks_per_step": 0}, "tasks_per_step: ", id="tasks"),
        pytest.param({"group_size": -1}, "group_size: ", id="group"),
        pytest.param({"max_lag": -1}, "max_lag: ", id="lag"),
        pytest.param({"retries": -1}, "retries: ", id="retries"),
        pytest.param({"deadline_s": float("inf")}, "deadline_s: ", id="infinite-deadline"),
        pytest.param({"lease_s": 0}, "lease_s: ", id="lease"),
        pytest.param({"lease_s": 60}, "expected less than deadline_s 60, got 60", id="lease-long"),
        pytest.param({"sampling": {"temperature": -1}}, "sampling.temperature", id="temperature"),
        pytest.param({"sampling": {"max_tokens": 0}}, "sampling.max_tokens", id="max-tokens"),
        pytest.param({"last_batch": "keep"}, "last_batch: ", id="last-batch"),
        pytest.param({"min_episodes": 0}, "min_episodes: ", id="no-members"),
        pytest.param({"min_episodes": 9}, "at most group_size 8, got 9", id="members"),
        pytest.param({"overdue": "drop"}, "overdue: ", id="overdue"),
        pytest.param({"overdue": "late"}, "at least max_lag 4 with overdue: late", id="late"),
        pytest.param(
            {"overdue": "late", "max_overdue_lag": 3}, "overdue: late, got 3", id="late-too-soon"
        ),
        pytest.param({"max_overdue_lag": 5}, "nothing with overdue: wait, got 5", id="not-late"),
        pytest.param({"filter": {"name": "range"}}, "no plugin named 'range'", id="filter"),
        pytest.param({"max_lags": 4}, "did you mean max_lag", id="typo"),
        pytest.param({"source": {"name": "jsnl"}}, "did you mean jsonl", id="plugin"),
        pytest.param({"source": {"name": "jsonl", "paht": "x"}}, "did you mean path", id="key"),
        pytest.param({"ledger": {"name": "rediss"}}, "did you mean redis", id="ledger"),
        pytest.param({"evaluation": {"every": 1, "sets": []}}, "evaluation.sets", id="no-sets"),
    ],
)
def test_what_is_wrong_is_named(changes, expected) -> None:
    with pytest.raises(ValidationError) as caught:
        read(**changes)

    assert expected in "\n".join(problems(caught.value, ExperienceConfig))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({"share": 0}, "evaluation.share", id="share"),
        pytest.param({"every": 0}, "evaluation.every", id="every"),
    ],
)
def test_what_is_wrong_with_evaluation_is_named(change, expected) -> None:
    evaluation = yaml.safe_load(RECIPE)["evaluation"]

    with pytest.raises(ValidationError) as caught:
        read(evaluation=evaluation | change)

    assert expected in "\n".join(problems(caught.value, ExperienceConfig))


@pytest.mark.parametrize("name", ["greedy", "a/b", ""])
def test_names_of_sets_are_ids_and_differ(name) -> None:
    evaluation = yaml.safe_load(RECIPE)["evaluation"]
    evaluation["sets"][1]["name"] = name

    with pytest.raises(ValidationError, match="sets"):
        read(evaluation=evaluation)
