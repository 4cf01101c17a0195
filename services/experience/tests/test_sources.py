"""Task sources: which row a cursor is, whatever the data set lies in."""

import json
import sys
from pathlib import Path

import pytest

from treadle_core.errors import InvalidFieldError
from treadle_experience.adapters.hugging_face import HuggingFaceTasks
from treadle_experience.adapters.jsonl import JsonlTasks
from treadle_experience.adapters.reasoning_gym import ReasoningGymTasks
from treadle_experience.adapters.rows import Order

ROWS = [{"question": f"{n} + 1", "answer": n + 1} for n in range(5)]
MAPPED = {"prompt": "question", "answer": "answer"}


def test_an_epoch_is_every_row_once_in_an_order_of_its_own() -> None:
    order = Order(50, epochs=2, shuffle=3)
    first, second = ([order.row(cursor) for cursor in range(s, s + 50)] for s in (0, 50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert order.row(100) is None


def test_a_restart_in_any_epoch_reads_the_same_rows() -> None:
    before = Order(7, epochs=9, shuffle=1)
    read = [before.row(cursor) for cursor in range(63)]
    for cursor in (62, 0, 31, 7, 6):
        assert Order(7, epochs=9, shuffle=1).row(cursor) == before.row(cursor) == read[cursor]


def test_the_order_of_a_seed_is_the_same_for_ever() -> None:
    order = Order(6, epochs=2, shuffle=0)
    assert [order.row(cursor) for cursor in range(12)] == [0, 3, 4, 1, 5, 2, 3, 1, 2, 0, 4, 5]


def test_a_data_set_may_be_read_without_end() -> None:
    assert Order(4, epochs=None, shuffle=None).row(4_000_003) == 3


@pytest.mark.parametrize(("length", "epochs", "field"), [(0, 1, "path"), (1, 0, "epochs")])
def test_nothing_to_read_is_told(length: int, epochs: int, field: str) -> None:
    with pytest.raises(InvalidFieldError, match=f"source.{field}"):
        Order(length, epochs=epochs, shuffle=None)


def jsonl(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_jsonl_tasks_are_the_lines_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "ä", "n": [1, {"x": null}]}\n{"prompt": "b"}\n', encoding="utf-8")

    tasks = JsonlTasks(str(path))

    first, second = {"prompt": "ä", "n": [1, {"x": None}]}, {"prompt": "b"}
    assert [tasks.read(cursor) for cursor in (0, 1, 2, 0)] == [first, second, None, first]


def test_columns_are_renamed_and_others_left_out(tmp_path: Path) -> None:
    tasks = JsonlTasks(str(jsonl(tmp_path / "a.jsonl")), columns={"prompt": "question"}, epochs=2)
    assert tasks.read(6) == {"prompt": "1 + 1"}
    assert tasks.read(10) is None


def test_a_missing_column_is_told_with_line_and_nearest(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl")
    with pytest.raises(InvalidFieldError, match=r"a.jsonl:1: .*'qestion'.*did you mean question"):
        JsonlTasks(str(path), columns={"prompt": "qestion"})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        pytest.param("{'a': 1}", "double quotes at column 2", id="quotes"),
        pytest.param('{"a": 1', "at column 8", id="open"),
        pytest.param("[1]", "each of its elements on a line", id="list"),
        pytest.param("", "remove it", id="empty"),
        pytest.param('{"a": NaN}', "write null", id="nan"),
        pytest.param("\udcff", "can't decode byte", id="utf8"),
        pytest.param("[" * 100_000, "recursion", id="deep"),
    ],
)
def test_a_bad_line_is_told_with_what_to_do(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(InvalidFieldError, match=rf"a.jsonl:2: .*{told}"):
        JsonlTasks(str(path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match=r"source\.path"):
        JsonlTasks(str(tmp_path / "none.jsonl"))


def saved(folder: Path) -> Path:
    """What `Dataset.save_to_disk` leaves, in two files."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, rows in zip(names, (ROWS[:3], ROWS[3:]), strict=True):
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(folder / name), table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def parquet(folder: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    for number, rows in enumerate((ROWS[:2], ROWS[2:])):
        pytest.importorskip("pyarrow.parquet").write_table(
            pa.Table.from_pylist(rows), folder / f"train-{number}.parquet"
        )
    return folder


@pytest.mark.parametrize("make", [saved, parquet])
def test_a_data_set_on_disk_is_its_rows(tmp_path: Path, make) -> None:
    tasks = HuggingFaceTasks(str(make(tmp_path / "set")), columns=MAPPED)
    assert [tasks.read(cursor) for cursor in range(6)] == [
        *({"prompt": row["question"], "answer": row["answer"]} for row in ROWS),
        None,
    ]


def test_a_split_is_picked_by_name(tmp_path: Path) -> None:
    saved(tmp_path / "set" / "train")
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert HuggingFaceTasks(str(tmp_path / "set"), split="train").read(4) == ROWS[4]
    with pytest.raises(InvalidFieldError, match=r"source\.split: expected one of train, test"):
        HuggingFaceTasks(str(tmp_path / "set"))


def test_a_missing_column_of_a_data_set_is_told_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InvalidFieldError, match="got question, answer; did you mean answer"):
        HuggingFaceTasks(str(saved(tmp_path / "set")), columns={"prompt": "anser"})


@pytest.mark.parametrize("name", ["none", "empty", "broken.arrow", "broken.parquet"])
def test_what_is_no_data_set_is_named(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "empty").mkdir()
    for broken in ("broken.arrow", "broken.parquet"):
        (tmp_path / broken).write_bytes(b"no data set")
    with pytest.raises(InvalidFieldError, match=name):
        HuggingFaceTasks(str(tmp_path / name))


def test_an_extra_that_is_not_installed_is_told_before_anything_starts(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(InvalidFieldError, match=r'pip install "treadle-experience\[reasoning-gym'):
        ReasoningGymTasks("chain_sum", size=3)


def test_reasoning_gym_tasks_follow_from_seed_and_cursor() -> None:
    pytest.importorskip("reasoning_gym")
    tasks, again = (ReasoningGymTasks("chain_sum", size=3, seed=1) for _ in range(2))
    read = [tasks.read(cursor) for cursor in range(4)]
    assert [again.read(cursor) for cursor in (2, 1)] == [read[2], read[1]]
    assert json.loads(json.dumps(read[0])) == read[0]
    assert read[0]["answer"] == "-4"
    assert read[3] is None


@pytest.mark.parametrize(
    ("task", "config", "told"),
    [("chain_sun", {}, "chain_sum"), ("chain_sum", {"terms": 3}, r"source\.config")],
)
def test_what_reasoning_gym_does_not_know_is_told(task: str, config, told: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(InvalidFieldError, match=told):
        ReasoningGymTasks(task, size=3, config=config)
