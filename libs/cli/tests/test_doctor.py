import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from treadle_cli import checkup, doctor
from treadle_cli.checkup import Finding, State

GIB = 2**30


@pytest.mark.parametrize(
    ("finding", "state", "advice"),
    [
        pytest.param(checkup.python((3, 12)), State.OK, "", id="python"),
        pytest.param(checkup.python((3, 10)), State.PROBLEM, "3.11", id="old-python"),
        pytest.param(checkup.cores(2), State.OK, "", id="cores"),
        pytest.param(checkup.cores(1), State.WARNING, "half", id="one-core"),
        pytest.param(checkup.memory(8 * GIB, GIB), State.OK, "", id="memory"),
        pytest.param(checkup.memory(GIB, 8 * GIB), State.WARNING, "8.0 needed", id="no-memory"),
        pytest.param(checkup.shared_memory(GIB, GIB), State.OK, "", id="shm"),
        pytest.param(checkup.shared_memory(1, GIB), State.PROBLEM, "--shm-size", id="no-shm"),
        pytest.param(checkup.open_files(-1), State.OK, "", id="no-limit"),
        pytest.param(checkup.open_files(256), State.WARNING, "ulimit", id="few-files"),
        pytest.param(checkup.clock(1.8e9, 1.8e9), State.OK, "", id="clock"),
        pytest.param(checkup.clock(1.8e9, 1.8e9 - 9), State.WARNING, "+9.0 s", id="two-clocks"),
        pytest.param(checkup.clock(9.0, 9.0), State.PROBLEM, "set it", id="no-clock"),
        pytest.param(checkup.sockets(), State.OK, "", id="sockets"),
    ],
)
def test_what_there_is_is_judged(finding: Finding, state: State, advice: str) -> None:
    assert finding.state is state
    assert advice in finding.text


@pytest.mark.skipif(find_spec("torch") is None, reason="what needs torch is tested elsewhere")
def test_libraries_that_are_there_are_enough() -> None:
    assert checkup.libraries().state is State.OK


def test_room_is_looked_for_where_the_run_will_be(tmp_path: Path) -> None:
    assert checkup.disk(tmp_path / "runs" / "first").state is State.OK
    assert not (tmp_path / "runs").exists()
    assert checkup.written_at(tmp_path / "runs") > 0


def test_every_finding_is_a_line_and_a_problem_is_the_status(tmp_path: Path, capsys) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("trainr: {}\n")

    assert doctor.main([str(recipe), "--json"]) == 1

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["state"] for row in rows if row["check"] == "recipe"} == {"problem"}
    assert any("did you mean trainer" in row["text"] for row in rows)
    assert {"python", "disk", "clock", "sockets", "gpu"} <= {row["check"] for row in rows}


@pytest.mark.parametrize("text", ["{", None], ids=["not-yaml", "absent"])
def test_a_recipe_that_cannot_be_read_is_a_problem(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_text(text)
    (finding,), plan = doctor.recipe(path, [])
    assert (finding.state, plan) == (State.PROBLEM, None)
    assert str(path) in finding.text


def test_requirements_are_compared_with_what_is_installed() -> None:
    def lacking(*needs: str) -> list[str]:
        return list(checkup._lacking("treadle-x", [*needs]))

    assert lacking("pydantic>=2", "nothing-such; extra == 'more'") == []
    assert "is installed" in lacking("pydantic>=99")[0]
    assert "not installed" in lacking("treadle-nothing-such>=1")[0]


def test_options_may_stand_between_a_recipe_and_its_overrides(tmp_path: Path, capsys) -> None:
    recipe, overlay = tmp_path / "recipe.yaml", tmp_path / "overlay.yaml"
    recipe.write_text("run: {dir: a}")
    overlay.write_text("run: {id: '?'}")

    doctor.main([str(recipe), "--overlay", str(overlay), "--json", "run.seed=x"])

    said = capsys.readouterr().out
    assert "run.id: " in said
    assert "run.seed: " in said
