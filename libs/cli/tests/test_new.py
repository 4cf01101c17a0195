from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from treadle_cli import new

TEMPLATE = files("treadle_cli") / "templates" / "project"


def test_a_project_is_the_template_in_a_folder_of_its_own(tmp_path: Path, capsys) -> None:
    assert new.main([str(tmp_path / "deep" / "mine")]) == 0

    written = {path.name for path in (tmp_path / "deep" / "mine").iterdir()}
    assert written == {entry.name for entry in TEMPLATE.iterdir()} - {"__pycache__"}
    assert {"recipe.yaml", "agent.py", "grader.py", "tasks.jsonl", "test_project.py"} <= written
    assert "treadle train recipe.yaml" in capsys.readouterr().out


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert new.main([str(tmp_path)]) == 0


@pytest.mark.parametrize("there", ["not empty", "a file"])
def test_nothing_is_overwritten(tmp_path: Path, capsys, there: str) -> None:
    kept = tmp_path / "agent.py"
    kept.write_text("mine")

    assert new.main([str(kept if there == "a file" else tmp_path)]) == 2

    assert there in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["agent.py"]
    assert kept.read_text() == "mine"


def test_what_the_recipe_names_is_in_the_project() -> None:
    recipe = yaml.safe_load((TEMPLATE / "recipe.yaml").read_text())
    warmup = yaml.safe_load((TEMPLATE / "warmup.yaml").read_text())
    named = [recipe["rollout"]["agent"]["name"], warmup["demonstrations"]["name"]]
    for file, _, attribute in (name.partition(":") for name in named):
        assert f"class {attribute}" in (TEMPLATE / file).read_text()
    assert (TEMPLATE / recipe["experience"]["source"]["path"]).is_file()
    assert (TEMPLATE / warmup["model"]["config"]).is_file()
    assert warmup["output"] == recipe["run"]["model"]
