from pathlib import Path

import pytest

from treadle_runtime import plugins
from treadle_runtime.plugins import PluginConfig, PluginError

SOURCE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Grader:
    tolerance: float = 0.0
    unit: str = "m"

class Agent:
    def __init__(self, turns: int) -> None:
        self.turns = turns

class Plain:
    pass
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def config(name: str, **parameters: object) -> PluginConfig:
    return PluginConfig.model_validate({"name": name, **parameters})


def test_builds_from_a_file_and_coerces_types(source: Path) -> None:
    grader = plugins.build("treadle.none", config(f"{source}:Grader", tolerance="1e-3"))

    assert grader.tolerance == 1e-3


def test_a_file_may_import_its_neighbours(source: Path) -> None:
    beside = source.with_name("beside.py")
    beside.write_text("from mine import Grader as Neighbour\n")

    assert plugins.build("treadle.none", config(f"{beside}:Neighbour")).unit == "m"


def test_what_the_service_provides_joins_what_the_recipe_gives(source: Path) -> None:
    assert plugins.build("treadle.none", config(f"{source}:Agent"), turns=3).turns == 3


@pytest.mark.parametrize(
    ("name", "parameters", "told"),
    [
        pytest.param("nothing", {}, "no plugin named 'nothing'", id="entry-point"),
        pytest.param("no.such:Thing", {}, "no module named 'no.such'", id="module"),
        pytest.param("no/such.py:Thing", {}, "no such file", id="file"),
        pytest.param("{source}:Grade", {}, "did you mean Grader", id="attribute"),
        pytest.param("{source}:Grader", {"tolerance": "much"}, "tolerance", id="type"),
        pytest.param("{source}:Agent", {}, "turns", id="missing"),
    ],
)
def test_a_bad_plugin_is_told_by_name(
    source: Path, name: str, parameters: dict[str, str], told: str
) -> None:
    with pytest.raises(PluginError, match=told):
        plugins.build("treadle.none", config(name.format(source=source), **parameters))


def test_check_finds_misspelt_parameters_without_importing(source: Path) -> None:
    source.write_text("raise RuntimeError('imported')\n" + SOURCE)

    assert plugins.check("treadle.none", config(f"{source}:Grader", unit="m")) == []
    (grader,) = plugins.check("treadle.none", config(f"{source}:Grader", tolerence=1))
    (agent,) = plugins.check("treadle.none", config(f"{source}:Agent", turn=1))
    assert "unknown key tolerence" in grader
    assert "did you mean tolerance" in grader
    assert "did you mean turns" in agent


def test_a_plugin_without_a_constructor_is_built_and_takes_nothing(source: Path) -> None:
    make = plugins.factory("treadle.none", config(f"{source}:Plain"))

    assert make() is not make()
    with pytest.raises(PluginError, match="takes no turns"):
        plugins.build("treadle.none", config(f"{source}:Plain", turns=1))
