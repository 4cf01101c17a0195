import re
from pathlib import Path
from typing import Any

import pytest

from treadle_cli import inputs

TASKS = '{"prompt": "1+1"}\n'
GRADERS = """
def text(answer, task): return "1"
def raises(answer, task): return {}[0]
"""
CODE = """
class Broken:
    def read(self, cursor): raise RuntimeError("no connection")
class Nothing:
    def read(self, cursor): return None
"""


def told(tmp_path: Path, source: dict[str, Any], **experience: Any) -> str:
    """What is wrong with a run that reads this source."""
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / name).touch()
    return "\n".join(inputs.check(tmp_path, {"experience": {"source": source, **experience}}))


def file(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    return {"name": "jsonl", "path": str(path)}


def test_tasks_that_can_be_read_are_right(tmp_path: Path) -> None:
    assert told(tmp_path, file(tmp_path, TASKS)) == ""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(TASKS + "{]\n", "experience.source: {path}:2: expected", id="line"),
        pytest.param("", "experience.source.path: expected at least one task", id="empty"),
    ],
)
def test_a_bad_file_is_told(tmp_path: Path, text: str, expected: str) -> None:
    source = file(tmp_path, text)
    assert told(tmp_path, source).startswith(expected.format(path=source["path"]))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("Broken", "source: no connection"), ("Nothing", "source: expected at least one task")],
)
def test_a_source_of_ones_own_is_tried(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / "own.py").write_text(CODE)
    assert expected in told(tmp_path, {"name": f"{tmp_path}/own.py:{name}"})


def test_sources_of_an_evaluation_are_named(tmp_path: Path) -> None:
    sets = [{"name": "held-out", "source": {"name": "jsonl", "path": "nowhere.jsonl"}}]
    found = told(tmp_path, file(tmp_path, TASKS), evaluation={"sets": sets})
    assert found.startswith("experience.evaluation.sets.held-out.source.path: expected a file")


@pytest.mark.parametrize(
    ("grader", "task", "expected"),
    [
        pytest.param("exact", '{"prompt": "1", "answer": 1}', "", id="right"),
        pytest.param("exakt", '{"prompt": "1"}', "rollout.agent: .*did you mean exact", id="name"),
        pytest.param("exact", '{"prompt": "1"}', "rollout.agent, .*: .*answer", id="no-answer"),
        pytest.param("exact", '{"question": "1"}', "messages, or prompt as text", id="no-prompt"),
        pytest.param("FILE:text", '{"prompt": "1"}', "expected a number .* got str", id="text"),
        pytest.param("FILE:raises", '{"prompt": "1"}', r"KeyError: 0 \(own.py:3\)", id="raises"),
    ],
)
def test_a_grader_is_tried(tmp_path: Path, grader: str, task: str, expected: str) -> None:
    (tmp_path / "own.py").write_text(GRADERS)
    policy = Path(__file__).parents[3] / "examples" / "calculator" / "policy"
    agent = {"name": "grader", "grader": grader.replace("FILE", f"{tmp_path}/own.py")}
    source = file(tmp_path, task + "\n")

    found = inputs.check(policy, {"experience": {"source": source}, "rollout": {"agent": agent}})

    assert re.search(expected, "".join(found)) if expected else not found


@pytest.mark.parametrize("missing", ["tokenizer.json", "*.safetensors"])
def test_a_folder_that_is_no_whole_policy_is_told(tmp_path: Path, missing: str) -> None:
    source = file(tmp_path, TASKS)
    told(tmp_path, source)
    next(tmp_path.glob(missing)).unlink()
    (found,) = inputs.check(tmp_path, {"experience": {"source": source}})
    assert missing in found
    assert "save_pretrained" in found
