"""One screen that says how a run does: a standing as text for a terminal of any size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from treadle_cli.standing import Score, Standing

_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 24
"""Characters of a curve."""
_MARKUP = r"<\|[^|<>]{1,40}\|>"
"""How chat markup says whose turn it is."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What a run's rows do not say."""

    run_id: str
    directory: str
    phase: str
    """What the run does now."""
    lacking: Sequence[str] = ()
    """What the machine lacks, a line each."""
    said: str = ""
    """The last line of the command's log."""
    facts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further lines, by their names."""
    is_running: bool = True


def render(standing: Standing, beside: Beside, now: float) -> RenderableType:
    """Everything, at the width that there is; `now` is in Unix seconds.

    Where the height is limited, the middle of the newest transcript is cut out.
    """
    parts: list[RenderableType] = [_title(standing, beside, now)]
    if standing.steps:
        parts.append(_bar(standing, standing.left_s(now) if beside.is_running else None))
    if beside.said:
        parts.append(Text(legible(beside.said), "bold", no_wrap=True, overflow="ellipsis"))
    parts.append(_numbers(standing, beside.facts))
    parts += [
        Text(f"! {legible(text)}", "yellow", overflow="fold")
        for text in (*beside.lacking, *standing.warnings().values())
    ]
    return _Fitted(Group(*parts), _transcript(standing))


def legible(text: str) -> str:
    """The text without what would command a terminal; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text.replace("\t", "  "))


def clock(seconds: float) -> str:
    """`0:41`, `1:02:03`, or `2 d 3 h`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def curve(values: Sequence[float]) -> str:
    """The values from their lowest to their highest, a character each, or for the mean of some."""
    count = min(len(values), _SPARKS)
    edges = [round(len(values) * place / count) for place in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    top = len(_BARS) - 1
    return "".join(_BARS[round((m - low) / (high - low) * top) if high > low else 0] for m in means)


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Two parts; where the height is limited the middle of the second is cut out."""

    first: RenderableType
    second: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(height=None)
        lines = console.render_lines(self.first, free, pad=False)
        more = console.render_lines(self.second, free, pad=False)
        if options.height is not None:
            lines, room = lines[: options.height], max(options.height - len(lines), 0)
            if len(more) > room:
                head = room - room // 2
                cut = [[Segment("  ...")]] if room else []
                more = [*more[: max(head - 1, 0)], *cut, *more[len(more) - room // 2 :]]
        for line in (*lines, *more):
            yield from line
            yield Segment.line()


def _title(standing: Standing, beside: Beside, now: float) -> RenderableType:
    title = Table.grid(expand=True)
    title.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    run = Text.assemble((legible(beside.run_id), "bold"), f" in {legible(beside.directory)}")
    since = f" {clock(max(now - standing.began, 0))}" if standing.began else ""
    title.add_row(run, Text(f" {beside.phase}{since}", "bold cyan"))
    return title


def _bar(standing: Standing, left_s: float | None) -> RenderableType:
    bar = Table.grid(expand=True, padding=(0, 1))
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        Text(f"step {standing.step}/{standing.steps}"),
        ProgressBar(standing.steps, standing.step),
        Text("" if left_s is None else f"{clock(left_s)} left"),
    )
    return bar


def _numbers(standing: Standing, facts: Mapping[str, str]) -> RenderableType:
    numbers = Table.grid(padding=(0, 2))
    numbers.add_column(style="dim", no_wrap=True)
    numbers.add_column(overflow="fold")
    row, engine = standing.last_step, standing.engine
    if row:
        reward = f"{row['reward']:.3f}" if "reward" in row else "absent"
        numbers.add_row("reward", Text(f"{reward}  {curve(list(standing.rewards.values()))}"))
    for place, (name, scores) in enumerate(standing.scores.items()):
        numbers.add_row("" if place else "held-out", Text(_held_out(name, scores)))
    if row:
        numbers.add_row("lag", Text(f"{row['lag_mean']:.1f} steps, at most {row['lag_max']:.0f}"))
    speeds = [f"{_short(engine['tokens_per_s'])} sampled"] if engine else []
    speeds += [f"{_short(row['tokens_per_s'])} trained"] if row else []
    if speeds:
        numbers.add_row("tokens/s", Text(", ".join(speeds)))
    for place, (name, shares) in enumerate(standing.waits.items()):
        waits = ", ".join(f"for {other} {share:.0%}" for other, share in shares.items())
        numbers.add_row("" if place else "waits", Text(f"{name} {waits}"))
    for name, text in facts.items():
        numbers.add_row(name, Text(legible(text)))
    return numbers


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


def _held_out(name: str, scores: Sequence[Score]) -> str:
    last = scores[-1]
    known = [each.score for each in scores if each.score is not None]
    score = "absent" if last.score is None else f"{last.score:.3f}"
    error = "" if last.std_error is None else f" ± {last.std_error:.3f}"
    failed = f", {last.num_failed} failed" if last.num_failed else ""
    return f"{name} {score}{error} at step {last.step}{failed}  {curve(known)}"


def _transcript(standing: Standing) -> RenderableType:
    row = standing.transcript
    if not row:
        return Text()
    reward = f"{row['reward']:g}" if "reward" in row else "absent"
    head = Text(f"{row['task_id']}, reward {reward}, version {row['version']}", "dim")
    text = Text(legible(row["text"]), overflow="fold")
    text.highlight_regex(_MARKUP, "bold cyan")
    return Group(Text(), head, Padding(text, (0, 0, 0, 2)))
