"""The screen, at any size."""

import io
import logging
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from treadle_cli import compose, live, screen
from treadle_cli.standing import Standing

SAID = "draining; Ctrl-C again ends at once"


@pytest.fixture
def standing() -> Standing:
    standing = Standing(steps=4)
    start = {"service": "trainer", "pid": 1, "restarts": 0}
    step = {"lag_mean": 1.0, "lag_max": 2, "wait_s": 1.0, "train_s": 1.0, "publish_s": 0.0}
    score = {"evaluation": "greedy", "step": 0, "score": 0.25, "std_error": 0.1}
    text = "<|user|>1+1<|end|>\n" + "thinking [bold]\x1b[31m\n" * 40 + "<answer>2<|end|>"
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("supervisor", "start", start),
        ("refit", "version", {"left_behind": 1}),
        ("experience", "evaluation", score | {"num_scored": 9, "num_failed": 1}),
        ("rollout", "rollout", {"up_s": 2.0, "waited_s": 1.0, "tokens_per_s": 1600.0}),
        ("rollout", "transcript", {"task_id": "t-1", "reward": 1.0, "version": 3, "text": text}),
    ]
    for number in (1, 2):
        values = {"step": number, "reward": number / 4, "tokens_per_s": 5300.0}
        rows.append(("trainer", "step", step | values))
    for time, (writer, name, row) in enumerate(rows):
        standing.fold(writer, {"time": 100.0 + time, "name": name, **row})
    return standing


def drawn(standing: Standing, *, width: int, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height or 99)
    beside = screen.Beside("run-1", "runs/demo", standing.phase, ["no room"], SAID)
    console.print(screen.render(standing, beside, now=107.0), height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [20, 40, 80, 160])
def test_all_of_it_fits_the_width(standing: Standing, width: int) -> None:
    lines = drawn(standing, width=width)

    assert max(map(cell_len, lines)) <= width
    assert any(line.startswith("step 2/4") for line in lines)


def test_it_says_what_there_is_to_say(standing: Standing) -> None:
    said = "\n".join(drawn(standing, width=80))

    for part in (
        "run-1 in runs/demo",
        "training 0:07",
        "0:01 left",
        "0.500  ▁█",
        "greedy 0.250 ± 0.100 at step 0, 1 failed",
        "1.0 steps, at most 2",
        "1.6k sampled, 5.3k trained",
        "rollout for trainer 50%, for refit 0%",
        "trainer for rollout 100%, for refit 0%",
        "! 1 engines left behind",
        "! no room",
        SAID,
        "t-1, reward 1, version 3",
    ):
        assert part in said


@pytest.mark.parametrize("height", [3, 10, 24])
def test_where_there_is_little_height_the_middle_of_the_transcript_goes_first(
    standing: Standing, height: int
) -> None:
    lines = drawn(standing, width=80, height=height)

    assert len(lines) <= height
    assert lines[2].startswith(SAID)
    assert (height < 20) or (lines[-1].strip() == "<answer>2<|end|>" and "  ..." in lines)


def test_what_a_policy_says_commands_no_terminal(standing: Standing) -> None:
    said = "\n".join(drawn(standing, width=80))

    assert "\x1b" not in said
    assert "thinking [bold]�[31m" in said


def test_before_there_are_rows_it_says_that_the_run_starts() -> None:
    lines = drawn(Standing(steps=4), width=40)

    assert "starting" in lines[0]


@pytest.mark.parametrize(
    ("seconds", "said"), [(41.9, "0:41"), (3723, "1:02:03"), (200_000, "2 d 7 h")]
)
def test_durations_are_as_short_as_they_can_be(seconds: float, said: str) -> None:
    assert screen.clock(seconds) == said


def test_a_curve_has_a_place_for_each_value_or_for_the_mean_of_some() -> None:
    assert screen.curve([]) == ""
    assert screen.curve([0.5]) == "▁"
    assert screen.curve([0, 7, 3.5]) == "▁█▅"
    assert len(screen.curve(list(range(1000)))) == 24


def test_the_live_screen_takes_the_log_in_and_leaves_the_terminal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    services = {"experience": {"steps": 4}}
    plan = compose.Plan("run-1", tmp_path, tmp_path, services, {}, 60.0)
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=80, height=24)
    handlers = list(logging.getLogger().handlers)

    with live.Screen(plan, console) as shown:
        logging.getLogger("treadle_cli.train").warning(SAID)
        shown.report()

    assert terminal.getvalue().count("\x1b[?1049h") == terminal.getvalue().count("\x1b[?1049l") == 1
    assert SAID in terminal.getvalue()
    assert capsys.readouterr().err == f"treadle: {SAID}\n"
    assert logging.getLogger().handlers == handlers


@pytest.mark.parametrize("term", ["dumb", ""])
def test_there_is_no_screen_where_there_is_no_terminal(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        encoding = "UTF-8"

        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert live.can_draw(Terminal())
    monkeypatch.setenv("TERM", term)
    assert not live.can_draw(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    Terminal.encoding = "ascii"
    assert not live.can_draw(Terminal())
