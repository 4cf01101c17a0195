"""Reading metrics files while they are written."""

import json
from pathlib import Path

from treadle_cli.rows import MetricsTail, RunTail


def row(name: str, time: float = 1.0) -> dict[str, object]:
    return {"time": time, "name": name}


def test_a_row_that_is_still_being_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = MetricsTail(path)
    assert tail.rows() == []
    line = json.dumps(row("b"))
    path.write_text(json.dumps(row("a")) + "\n" + line[:9])

    assert tail.rows() == [row("a")]
    with path.open("a") as file:
        file.write(line[9:] + "\n")
    assert tail.rows() == [row("b")]


def test_what_a_power_cut_left_of_a_row_is_none(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"time": 1, "na\n' + b"\0\0\0\n" + json.dumps(row("a")).encode() + b"\n")

    assert MetricsTail(path).rows() == [row("a")]


def test_rows_of_all_services_come_in_the_order_of_their_time(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    for writer, time in (("trainer", 3.0), ("refit", 1.0), ("supervisor", 3.0)):
        path = tmp_path / "metrics" / f"{writer}.jsonl"
        path.write_text(json.dumps(row(writer, time)) + "\n")

    assert [name for name, _ in RunTail(tmp_path).rows()] == ["refit", "supervisor", "trainer"]
