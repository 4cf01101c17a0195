import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from treadle_cli import configure
from treadle_runtime.config import BAD_CONFIGURATION, read_yaml

pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="what needs torch is tested elsewhere"
)

ROOT = Path(__file__).parents[3]
RECIPE = "recipes/calculator.yaml"
CONTAINERS = "recipes/overlays/containers.yaml"


def test_a_run_is_laid_out_for_services_that_others_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)

    status = configure.main([RECIPE, f"run.dir={tmp_path}/run", "--overlay", CONTAINERS])

    assert status == 0
    told = {path.stem: read_yaml(path) for path in map(Path, capsys.readouterr().out.split())}
    assert told.keys() == {"experience", "rollout", "trainer", "refit"}
    assert {each["run"]["insecure_dev"] for each in told.values()} == {True}
    assert told["trainer"]["experience_address"] == "experience:7001"
    assert (
        json.loads((tmp_path / "run" / "run.json").read_text())["id"] == told["refit"]["run"]["id"]
    )


def test_a_server_that_nobody_would_start_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)

    status = configure.main([RECIPE, f"run.dir={tmp_path}/run", "experience.ledger={name: redis}"])

    assert status == BAD_CONFIGURATION
    assert "redis: the recipe gives no address" in capsys.readouterr().err
