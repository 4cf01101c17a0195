"""`treadle report`: charts, the curves of a run's rows, and the page."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise

import pytest

from treadle_cli import train
from treadle_cli.report import command, curves, transcripts
from treadle_cli.report.charts import MOST_POINTS, Chart, Series, axis, draw, number, thinned

NO_CLOSING = {"meta", "td", "th"}


class Balanced(HTMLParser):
    """Raises where an element is closed that is not the innermost one; keeps what refers out."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.outside += [value for name, value in attrs if name in ("src", "href")]
        if tag not in NO_CLOSING:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def step(number: int, time: float, **more) -> tuple[str, dict]:
    row = {"name": "step", "step": number, "time": time, "reward": 0.5, "num_episodes": 4}
    row |= {"lag_mean": 1.0, "lag_max": 2, "kl": 0.01, "entropy": 0.4, "clip_fraction": 0.1}
    return "trainer", row | {"wait_s": 1.0, "tokens": 200, "tokens_per_s": 50.0} | more


def rollout(time: float, up_s: float, waited_s: float, sampled: int) -> tuple[str, dict]:
    row = {"name": "rollout", "time": time, "up_s": up_s, "waited_s": waited_s}
    return "rollout", row | {"sampled_tokens": sampled}


def score(number: int, value: float | None, time: float) -> tuple[str, dict]:
    row = {"name": "evaluation", "evaluation": "greedy", "step": number, "time": time}
    return "experience", row if value is None else row | {"score": value}


def side(reward: float | None, said: str = "hello") -> dict:
    pieces = [
        {"role": "prompt", "text": "<|user|>1 < 2?", "versions": []},
        {"role": "policy", "text": said, "versions": [1]},
    ]
    return {"step": 0, "reward": reward, "termination": "finished", "pieces": pieces}


def pair(before: float | None, after: float | None, said: str = "hello") -> dict:
    return {"task": {}, "before": side(before), "after": side(after, said)}


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        pytest.param(0, 1, [0, 0.5, 1], id="unit"),
        pytest.param(0, 0.0186, [0, 0.005, 0.01, 0.015, 0.02], id="small"),
        pytest.param(-3, 8, [-5, 0, 5, 10], id="negative"),
        pytest.param(0, 9800, [0, 5000, 10000], id="large"),
        pytest.param(0, 0, [0, 0.5, 1], id="all-zero"),
    ],
)
def test_an_axis_ends_at_round_numbers_around_its_values(low, high, ticks) -> None:
    assert axis(low, high, 4).ticks == pytest.approx(ticks)


def test_a_tight_axis_ends_at_its_values() -> None:
    found = axis(1, 60, 6, tight=True)

    assert (found.low, found.high) == (1, 60)
    assert found.ticks == [10, 20, 30, 40, 50, 60]


def test_long_lines_are_thinned_to_means_and_say_so() -> None:
    points = [(float(n), float(n % 2)) for n in range(10 * MOST_POINTS)]

    drawn = draw(Chart("T", "unit", "step", [Series("a", points, 0), Series("b", [(0, 1)], 1)]))

    assert {y for _, y in thinned(points, MOST_POINTS)} == {0.5}
    assert "a (means of 10)" in drawn


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([], id="none"),
        pytest.param([(1, 0.0)], id="one"),
        pytest.param([(1, 2.0), (2, 2.0)], id="equal"),
        pytest.param([(1, -1e-10), (2, 1.0)], id="rounding"),
    ],
)
def test_a_chart_is_whole_whatever_its_values(points) -> None:
    drawn = draw(Chart("A < B", "unit", "step", [Series("s", points, 0)]))

    parser = Balanced()
    parser.feed(drawn)
    assert parser.open == []
    assert "A &lt; B" in drawn
    assert ("no values" in drawn) == (not points)
    assert ">-" not in drawn  # no tick below 0


def test_a_chart_says_in_words_what_it_shows() -> None:
    drawn = draw(Chart("Reward", "mean", "step", [Series("all", [(1, 0.2), (2, 0.9)], 0)]))

    assert 'aria-label="Reward by step, mean: all from 0.2 to 0.9, at least 0.2, at most' in drawn


@pytest.mark.parametrize(
    ("value", "text"), [(12345, "12,345"), (0.5, "0.5"), (0, "0"), (1e-5, "1e-05")]
)
def test_numbers_are_short(value, text) -> None:
    assert number(value) == text


def test_a_step_that_was_trained_again_counts_once_with_the_later_row() -> None:
    rows = [step(1, 1.0), step(2, 2.0, reward=0.1), step(2, 9.0, reward=0.9)]

    assert [row["reward"] for row in curves.steps(rows)] == [0.5, 0.9]


def test_running_time_leaves_out_when_nothing_ran() -> None:
    passed = curves.running_time([step(1, 100.0), step(2, 104.0), step(3, 9000.0)])

    assert [passed(time) for time in (100.0, 104.0, 9000.0, 9001.0)] == [0, 4, 4, 5]


def test_idle_shares_are_of_the_services_own_time() -> None:
    rows = [
        step(1, 4.0),
        rollout(4.0, 4.0, 1.0, 100),
        rollout(6.0, 6.0, 2.0, 200),
        rollout(9.0, 1.0, 1.0, 10),  # another process
        ("experience", {"name": "counts", "time": 2.0, "append_s": 0.5, "up_s": 1.0}),
        ("experience", {"name": "counts", "time": 12.0, "append_s": 3.0, "up_s": 11.0}),
        ("refit", _version(1, 2.0)),
        ("refit", _version(2, 6.0)),
    ]
    rows.sort(key=lambda each: each[1]["time"])

    idle = next(chart for chart in curves.speed(rows) if chart.title == "Idle share")

    shares = {each.name: each.summary for each in idle.series}
    assert shares == {"trainer": "25%", "rollout": "67%", "experience": "75%", "refit": "75%"}
    assert all(0 <= y <= 100 for each in idle.series for _, y in each.points)


def _version(number: int, time: float) -> dict:
    row = {"name": "version", "version": number, "step": number, "time": time, "total_s": 1.0}
    return row | {"bytes": 8, "aliased": 0, "left_behind": 0}


def test_windows_weigh_by_time() -> None:
    found = [curves.Interval(1.0, 1.0, 1.0), curves.Interval(1.0, 3.0, 0.0)]

    assert curves.windows(found, 2.0 * curves.WINDOWS) == [(1.0, 0.25)]


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        pytest.param(0.0, 1.0, "better", id="better"),
        pytest.param(None, 0.0, "better", id="a-reward-at-last"),
        pytest.param(1.0, 0.0, "worse", id="worse"),
        pytest.param(0.0, 0.0, "no better", id="no-better"),
        pytest.param(1.0, 1.0, "as good", id="as-good"),
    ],
)
def test_a_pair_is_told_by_what_became_of_it(before, after, kind) -> None:
    assert transcripts.kind(pair(before, after), best=1.0) == kind


def test_failures_are_shown_too_and_nothing_that_was_said_is_markup() -> None:
    pairs = [pair(0.0, 1.0)] * 9 + [pair(0.0, 0.0, "<script>")]

    shown = transcripts.cards(pairs)

    assert "10 tasks, scored at steps 0 and 0: 9 better, 0 worse, 1 no better, 0 as good" in shown
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert "<i>&lt;|user|&gt;</i>1 &lt; 2?" in shown


@pytest.fixture
def run(tmp_path):
    rows = [
        ("supervisor", {"name": "start", "service": "trainer", "pid": 7, "time": 1.0}),
        score(0, None, 2.0),
        step(1, 3.0),
        step(2, 4.0, kl=0.02),
        score(2, 0.75, 5.0),
        ("refit", _version(1, 3.5)),
        ("rollout", {"name": "version", "version": 1, "time": 3.6, "load_s": 1, "install_s": 1}),
        ("supervisor", _death(6.0)),
    ]
    (tmp_path / "metrics").mkdir()
    for writer, row in rows:
        with (tmp_path / "metrics" / f"{writer}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    recipe = {"run": {"dir": "runs/a", "model": "m<odel"}, "experience": {"steps": 3}}
    (tmp_path / "run.json").write_text(json.dumps({"id": "run-1", "recipe": recipe}))
    return tmp_path


def _death(time: float) -> dict:
    row = {"name": "death", "service": "trainer", "pid": 7, "time": time, "signal": "SIGKILL"}
    return row | {"status": -1, "lived_s": 5.0, "last_line": "<b>last</b>"}


def test_the_page_is_one_file_that_asks_nobody_for_anything(run, capsys) -> None:
    assert command.main([str(run), "-o", str(run / "page.html")]) == 0

    page = (run / "page.html").read_text()
    parser = Balanced()
    parser.feed(page)
    assert parser.open == ["html"] or parser.open == []
    assert parser.outside == []
    assert not re.search(r"url\(|@import|https?:", page)
    assert "default-src 'none'" in page
    assert capsys.readouterr().out.strip() == str(run / "page.html")


def test_the_page_has_the_numbers_of_the_run(run) -> None:
    page = command.write(run).read_text()

    for told in ("run-1", "m&lt;odel", "2 of 3", "0.750", "SIGKILL", "&lt;b&gt;last&lt;/b&gt;"):
        assert told in page
    for title in ("Reward", "Lag", "KL divergence", "Clip fraction", "Entropy", "Idle share"):
        assert f"<h3>{title}</h3>" in page


def test_a_run_that_has_no_rows_yet_has_a_report(tmp_path) -> None:
    record = {"id": "run-1", "recipe": {"run": {"dir": "runs/a", "model": "m"}}}
    (tmp_path / "run.json").write_text(json.dumps(record))

    assert "no values" in command.write(tmp_path).read_text()


def test_a_directory_without_a_run_is_refused_by_name(tmp_path, capsys) -> None:
    assert command.main([str(tmp_path)]) == command.UNREADABLE
    assert capsys.readouterr().err.endswith(f"as `treadle train` makes it, got {tmp_path}\n")


def test_a_report_that_fails_is_told_and_ends_nothing(tmp_path, caplog) -> None:
    train._report(tmp_path)

    assert "no report: InvalidFieldError" in caplog.text


def test_every_colour_stands_out_from_its_background() -> None:
    style = (files("treadle_cli.report") / "style.css").read_text()
    for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL):
        colours = dict(re.findall(r"--(\w+): (#\w{6})", block))
        grounds = [_luminance(colours[name]) for name in ("page", "card")]
        for name in ("ink", "soft", "good", "bad"):
            assert all(_contrast(_luminance(colours[name]), each) >= 4.5 for each in grounds), name
        for name in (f"s{style}" for style in range(6)):
            assert _contrast(_luminance(colours[name]), grounds[0]) >= 3, name


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


def test_dots_are_in_the_order_of_their_steps() -> None:
    rows = [score(4, 0.9, 1.0), score(0, 0.1, 2.0), score(2, 0.5, 3.0)]

    reward = curves.learning(rows)[0]

    points = reward.series[1].points
    assert all(a < b for a, b in pairwise(points))


def test_a_score_has_a_bar_of_its_standard_error_where_it_is_known() -> None:
    writer, known = score(2, 0.5, 1.0)
    rows = [score(0, 0.5, 0.0), (writer, known | {"std_error": 0.25})]

    reward = curves.learning(rows)[0]

    assert reward.series[1].errors == [0.0, 0.25]
    drawn = draw(reward)  # its axes are from 0 to 0.8 and from 0 to 2
    assert "M100.00 68.75V6.25" in drawn
    assert ">1.5<" not in drawn  # there is no half of a step
