import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from treadle_cli import compose
from treadle_cli.compose import RecipeError
from treadle_payloads.sidecar import SidecarConfig
from treadle_runtime import sockets
from treadle_runtime.config import parse_overrides, read_yaml

SOURCE = "class Tasks:\n    def __init__(self, split: str) -> None: ...\n"
AGENT = "class Agent:\n    def __init__(self, calls: int = 6) -> None: ...\n"


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """The least that a recipe must say."""
    (tmp_path / "tasks.py").write_text(SOURCE)
    (tmp_path / "agent.py").write_text(AGENT)
    model = tmp_path / "policy"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    return {
        "run": {"dir": str(tmp_path / "run"), "model": str(model)},
        "experience": {
            "steps": 2,
            "tasks_per_step": 2,
            "group_size": 2,
            "max_lag": 1,
            "deadline_s": 60,
            "source": {"name": f"{tmp_path}/tasks.py:Tasks", "split": "train"},
        },
        "rollout": {
            "engine": {"name": "scripted"},
            "agent": {"name": f"{tmp_path}/agent.py:Agent"},
            "slots": 4,
            "max_turns": 2,
        },
        "trainer": {"optimizer": {"learning_rate": 1.0e-4}},
        "refit": {},
    }


def problems(recipe: dict[str, Any], **how: Any) -> str:
    with pytest.raises(RecipeError) as refused:
        compose.compose(recipe, **how)
    return str(refused.value)


def test_a_run_keeps_a_recipe_that_goes_on_with_it(recipe: dict[str, Any]) -> None:
    plan = compose.compose(recipe)
    compose.write(plan, recipe)

    kept = read_yaml(plan.directory / compose.RECIPE)

    assert compose.compose(kept).run_id == plan.run_id


def test_each_service_gets_its_part_the_run_and_its_peers(recipe: dict[str, Any]) -> None:
    plan = compose.compose(recipe)

    assert list(plan.services) == list(compose.SERVICES)
    trainer, experience = plan.services["trainer"], plan.services["experience"]
    assert trainer["experience_address"] == experience["listen"]
    assert trainer["refit_address"] == plan.services["refit"]["listen"]
    assert trainer["run"]["id"] == experience["run"]["id"] == plan.run_id
    assert "trainer_address" not in experience


def test_a_run_has_a_sidecar_of_its_own_unless_it_names_one(recipe: dict[str, Any]) -> None:
    assert compose.compose(recipe).sidecar is None
    recipe["run"]["payloads"] = {"name": "sidecar", "budget_bytes": 10**12}

    plan = compose.compose(recipe)
    paths = compose.write(plan, recipe)

    told = SidecarConfig.model_validate(read_yaml(paths[compose.SIDECAR]))
    assert (told.run.id, told.budget_bytes) == (plan.run_id, 10**12)
    assert told.experience_address == plan.services["experience"]["listen"]
    for service in plan.services.values():
        payloads = service["run"]["payloads"]
        assert (payloads["upload"], payloads["node"]) == (str(told.upload), told.listen)

    recipe["run"]["dir"] += "-elsewhere"
    recipe["run"]["payloads"] |= {"upload": "/run/payloads.sock", "node": "host:5000"}
    assert compose.compose(recipe).sidecar is None


def test_what_is_wrong_with_a_sidecar_is_told_with_all_else(recipe: dict[str, Any]) -> None:
    recipe["run"]["payloads"] = {"name": "sidecar", "budget_bytes": 0}
    recipe["experience"]["steps"] = -1

    told = problems(recipe)

    assert "run.payloads.budget_bytes" in told
    assert "experience.steps" in told


def test_a_node_holds_what_the_ledger_lets_wait_for_a_checkpoint(recipe: dict[str, Any]) -> None:
    recipe["run"]["payloads"] = {"name": "sidecar", "budget_bytes": 10**9}
    assert "run.payloads.budget_bytes: expected at least experience" in problems(recipe)

    recipe["experience"]["payload_budget_bytes"] = 10**9
    assert compose.compose(recipe).sidecar


def test_a_key_that_no_payload_store_has_is_told(recipe: dict[str, Any]) -> None:
    recipe["run"]["payloads"] = {"name": "sidecar", "uplaod": "/run/payloads.sock"}

    assert "did you mean upload" in problems(recipe)


def test_a_run_directory_keeps_its_id(recipe: dict[str, Any]) -> None:
    plan = compose.compose(recipe)
    paths = compose.write(plan, recipe)

    again = compose.compose(recipe)

    assert again.run_id == plan.run_id
    assert yaml.safe_load(paths["refit"].read_text()) == plan.services["refit"]


def test_a_run_directory_keeps_its_recipe_but_for_what_is_allowed(recipe: dict[str, Any]) -> None:
    compose.write(compose.compose(recipe), recipe)
    recipe["experience"]["steps"] = 3

    assert "experience.steps" in problems(recipe)
    compose.compose(recipe, allowed_changes=("experience.steps",))


def test_a_run_that_never_began_takes_another_recipe(recipe: dict[str, Any]) -> None:
    plan = compose.compose(recipe)
    compose.write(plan, recipe)
    (plan.directory / "lock").touch()
    recipe["rollout"]["max_turns"] = 3

    assert compose.compose(recipe).services["rollout"]["max_turns"] == 3


def test_a_recipe_of_sft_is_known_for_one(recipe: dict[str, Any]) -> None:
    told = problems({"model": {}, "demonstrations": {"name": "x"}, "output": "policy"})

    assert told == "demonstrations: this is a recipe of `treadle sft`, not of a run"


def test_every_problem_of_every_service_is_told_at_once(recipe: dict[str, Any]) -> None:
    recipe["experiense"] = {}
    recipe["run"]["model"] = "no/such/folder"
    recipe["experience"]["max_lagg"] = 1
    recipe["experience"]["source"]["splitt"] = "x"
    recipe["rollout"]["engine"]["name"] = "scriptd"
    recipe["rollout"]["agent"]["name"] = "no/agent.py:Agent"
    recipe["trainer"] = None

    told = problems(recipe)

    assert "unknown key experiense; did you mean experience" in told
    assert "run.model: no Hugging Face folder at no/such/folder" in told
    assert "unknown key experience.max_lagg; did you mean experience.max_lag" in told
    assert "unknown key splitt" in told
    assert "did you mean scripted" in told
    assert "no/agent.py: no such file" in told
    assert "trainer: expected a mapping, got NoneType" in told


def test_overrides_reach_into_the_recipe() -> None:
    assert parse_overrides(["a.b=1", "a.c=[2, x]"]) == {"a": {"b": 1, "c": [2, "x"]}}


def test_a_deep_run_directory_gets_short_socket_paths_that_do_not_outlive_the_run(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe["run"]["dir"] = str(tmp_path / ("deep" * 30))

    plan = compose.compose(recipe)

    paths = [Path(values["listen"].removeprefix("unix:")) for values in plan.services.values()]
    assert all(len(str(path)) < 108 - len(".lock") for path in paths)
    (folder,) = {path.parent for path in paths}
    folder.mkdir()
    sockets.remove(plan.directory)
    assert not folder.exists()


def test_a_folder_of_sockets_within_the_run_stays(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "sockets"
    folder.mkdir(parents=True)

    sockets.remove(tmp_path / "run")

    assert folder.is_dir()


def test_the_record_of_a_run_is_plain_json(recipe: dict[str, Any], tmp_path: Path) -> None:
    compose.write(compose.compose(recipe), recipe)

    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"] == recipe


def test_a_record_that_is_torn_is_told(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{")

    assert f"as `treadle train` makes it, got {tmp_path / 'run'}" in problems(recipe)


def test_a_run_may_be_given_its_id(recipe: dict[str, Any]) -> None:
    recipe["run"]["id"] = "mine"
    plan = compose.compose(recipe)

    assert plan.run_id == "mine"
    assert {part["run"]["id"] for part in plan.services.values()} == {"mine"}
    assert "run.id" in problems({**recipe, "run": {**recipe["run"], "id": "no/id"}})


@pytest.mark.parametrize(("max_lag", "publish_every"), [(0, 2), (1, 3)])
def test_publishing_too_rarely_would_close_the_window(
    recipe: dict[str, Any], max_lag: int, publish_every: int
) -> None:
    recipe["experience"]["max_lag"] = max_lag
    recipe["trainer"]["publish_every"] = publish_every
    told = problems(recipe)
    assert f"trainer.publish_every: expected at most {max_lag + 1}" in told
    recipe["trainer"]["publish_every"] = max_lag + 1
    compose.compose(recipe)


def test_a_score_of_a_step_that_is_not_published_cannot_be_had(recipe: dict[str, Any]) -> None:
    source = {"name": "jsonl", "path": "x"}
    sets = [{"name": "greedy", "source": source, "limit": 1}]
    recipe["experience"] |= {"steps": 9, "max_lag": 2, "evaluation": {"every": 3, "sets": sets}}
    recipe["trainer"]["publish_every"] = 2

    told = problems(recipe)

    assert "experience.evaluation.every: expected a multiple of 2 = trainer.publish_every" in told
    recipe["trainer"]["publish_every"] = 3
    compose.compose(recipe)


def test_the_gateway_and_the_services_share_no_port(recipe: dict[str, Any]) -> None:
    recipe["rollout"]["gateway"] = {"port": 7000, "workers": 3}
    recipe["trainer"]["listen"] = "127.0.0.1:7002"

    told = problems(recipe)

    assert "trainer.listen: expected a port outside 7000 to 7002, which rollout.gateway" in told
    recipe["trainer"]["listen"] = "127.0.0.1:7003"
    compose.compose(recipe)


@pytest.mark.parametrize(
    ("gateway", "says"),
    [
        ({"host": "0.0.0.0"}, "gateway.host: expected loopback, or a certificate"),  # noqa: S104
        ({"certificate": "c.pem"}, "certificate: expected with private_key"),
        ({"port": 65535, "workers": 2}, "port: expected at most 65534"),
        ({"run_token_file": "t", "run_token_env": "T"}, "run_token_file: expected alone"),
        ({"other_sampling": "ignore"}, "rollout.gateway.other_sampling"),
        ({"max_request": 3}, "did you mean rollout.gateway.max_requests"),
        ({"trained": ["sub-agent"]}, "trained: no label 'sub-agent'; did you mean subagent"),
        ({"trained": []}, "rollout.gateway.trained"),
    ],
)
def test_what_a_gateway_cannot_be_told_is_found_first(
    recipe: dict[str, Any], gateway: dict[str, Any], says: str
) -> None:
    recipe["rollout"]["gateway"] = gateway
    assert says in problems(recipe)


def test_how_long_a_service_may_be_silent_is_for_the_supervisor(recipe: dict[str, Any]) -> None:
    plan = compose.compose({**recipe, "run": {**recipe["run"], "hung_s": 300}})

    assert plan.hung_s == 300
    assert all("hung_s" not in part["run"] for part in plan.services.values())
    assert "run.hung_s" in problems({**recipe, "run": {**recipe["run"], "hung_s": 1}})


def test_payloads_beyond_their_budget_are_refused_with_the_arithmetic(
    recipe: dict[str, Any],
) -> None:
    recipe["rollout"]["engine"] = {"name": "scripted", "max_context": 1000}
    recipe["trainer"]["checkpoint_every"] = 5
    recipe["experience"]["payload_budget_bytes"] = 339_999

    told = problems(recipe)

    assert "experience.payload_budget_bytes: expected at least 340000 = " in told
    assert "trainer.checkpoint_every 5 * experience.tasks_per_step 2" in told
    recipe["experience"]["payload_budget_bytes"] = 340_000
    compose.compose(recipe)


def test_a_tracker_that_does_not_exist_is_told_once(recipe: dict[str, Any]) -> None:
    recipe["run"]["trackers"] = [{"name": "tensorbord"}]

    assert problems(recipe).count("did you mean tensorboard") == 1


def test_every_service_has_the_trackers_of_the_run(recipe: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard")
    recipe["run"]["trackers"] = [{"name": "tensorboard"}]

    plan = compose.compose(recipe)

    assert all(
        part["run"]["trackers"] == [{"name": "tensorboard"}] for part in plan.services.values()
    )


def test_overlays_are_laid_over_the_recipe_in_order_and_overrides_over_them(tmp_path: Path) -> None:
    files = {
        "recipe": {"experience": {"steps": 1, "ledger": {"name": "sqlite", "path": "x"}}},
        "first": {"experience": {"steps": 2, "ledger": {"name": "redis"}}},
        "second": {"experience": {"steps": 3, "ledger": {"durability": "process"}}},
    }
    for name, values in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(values))

    read = compose.read_recipe(
        tmp_path / "recipe",
        overlays=[tmp_path / "first", tmp_path / "second"],
        overrides=["experience.steps=4"],
    )

    ledger = {"name": "redis", "durability": "process"}
    assert read == {"experience": {"steps": 4, "ledger": ledger}}


def test_the_shipped_overlays_name_what_there_is(recipe: dict[str, Any], tmp_path: Path) -> None:
    overlays = Path(__file__).parents[3] / "recipes" / "overlays"
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    expected = {
        "embedded": [],
        "redis": ["redis"],
        "redis-nats-ray": ["ray", "nats", "redis"],
    }

    for name, started in expected.items():
        overlaid = compose.read_recipe(
            tmp_path / "recipe.yaml", overlays=[overlays / f"{name}.yaml"]
        )
        assert [server.name for server in compose.compose(overlaid).servers] == started


def test_an_overlay_is_kept_with_the_run_and_another_is_another_run(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    overlaid = {**recipe, "run": {**recipe["run"], "doorbell": {"name": "nats"}}}
    plan = compose.compose(overlaid)
    compose.write(plan, overlaid)
    (tmp_path / "run" / "checkpoints").mkdir()
    kept = read_yaml(plan.directory / compose.RECIPE)

    assert compose.compose(kept).servers[0].address == plan.servers[0].address
    assert "run.doorbell.name" in problems(recipe)
    assert "nats" in read_yaml(plan.directory / "config" / "rollout.yaml")["run"]["doorbell"]["url"]
