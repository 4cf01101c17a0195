"""Line charts as HTML: an SVG that stretches, and axis labels that do not.

The page's style.css has the colours and sizes, hover.js reads the values out; without the script a
chart is whole. Nothing here knows what is drawn.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

MOST_POINTS = 400
"""Points of a line; of longer ones, means of neighbours are drawn."""
NUM_STYLES = 6
"""Colours and dashes of style.css: classes s0 to s5."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line."""

    name: str
    points: Sequence[Point]
    """In the order of x."""
    style: int
    dots: bool = False
    """Its points are few, and each is marked."""
    errors: Sequence[float] = ()
    """Half the length of the bar at each point; none where there is nothing."""
    summary: str = ""
    """One number for all of it, in the legend."""


@dataclass(frozen=True, slots=True)
class Chart:
    """What to draw; only finite numbers."""

    title: str
    y_label: str
    """What the values are, with their unit."""
    x_label: str
    series: Sequence[Series]
    top: float | None = None
    """Upper end of the y axis; else it follows the values. It begins at 0, or below."""
    wide: bool = False

    def drawn(self) -> list[Series]:
        """The series that have points."""
        return [each for each in self.series if each.points]


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a plot."""

    low: float
    high: float
    ticks: Sequence[float]

    def place(self, value: float) -> float:
        """Where a value lies, in percent from the low end; none lies outside."""
        return 100 * min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def draw(chart: Chart) -> str:
    """The chart as a `<figure>`; a sentence instead of a plot where no series has a point."""
    series = [_thinned(each) for each in chart.drawn()]
    head = f"<h3>{escape(chart.title)}</h3><p>{escape(chart.y_label)}</p>"
    kind = "chart wide" if chart.wide else "chart"
    if not series:
        return f'<figure class="{kind}">{head}<p class="none">no values</p></figure>'
    xs = [x for each in series for x, _ in each.points]
    ys = [y for each in series for _, y in each.points] + [
        y for each in series for y in _bars(each)
    ]
    whole = all(float(x).is_integer() for x in xs)
    x_axis = axis(min(xs), max(xs), 6, tight=True, least=1.0 if whole else 0.0)
    y_axis = axis(_bottom(ys), max(ys) if chart.top is None else chart.top, 4)
    plot = (
        f'<div class="plot" role="img" tabindex="0" aria-label="{escape(_in_words(chart))}" '
        f'data-chart="{escape(_values(chart, series, x_axis, y_axis))}">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(_grid(y_axis))}{''.join(_line(each, x_axis, y_axis) for each in series)}</svg>"
        f"{''.join(_ticks(y_axis, 'y', 'bottom'))}{''.join(_ticks(x_axis, 'x', 'left'))}</div>"
    )
    label = f'<p class="x-label">{escape(chart.x_label)}</p>'
    return f'<figure class="{kind}">{head}{_legend(series)}{plot}{label}</figure>'


def axis(low: float, high: float, most: int, *, tight: bool = False, least: float = 0.0) -> Axis:
    """An axis over the values, with at most `most` steps of 1, 2 or 5 times a power of ten.

    No step is shorter than `least`. It ends at ticks, or at the values where it is `tight`.
    """
    if high <= low:
        high = low + (abs(low) or 1.0)
    step = _nice_step(max((high - low) / most, least))
    first = math.ceil(low / step - 1e-9) if tight else math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if tight else math.ceil(high / step - 1e-9)
    ticks = [round(number * step, 12) for number in range(first, last + 1)]
    return Axis(low, high, ticks) if tight else Axis(ticks[0], ticks[-1], ticks)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points: means of as many neighbours each as that takes."""
    size = -(-len(points) // most)
    groups = [points[start : start + size] for start in range(0, len(points), max(size, 1))]
    return [(_mean(x for x, _ in group), _mean(y for _, y in group)) for group in groups]


def number(value: float) -> str:
    """A number as people write it: 12,300 but 0.0123."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _bottom(ys: Sequence[float]) -> float:
    """0, or the lowest value where it is below by more than rounding."""
    low, high = min(ys), max(ys)
    return low if low < -0.01 * max(high, -low) else 0.0


def _thinned(series: Series) -> Series:
    if len(series.points) <= MOST_POINTS:
        return series
    points = thinned(series.points, MOST_POINTS)
    each = -(-len(series.points) // MOST_POINTS)
    return Series(f"{series.name} (means of {each})", points, series.style, series.dots)


def _nice_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * (1 - 1e-9))


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _bars(series: Series) -> list[float]:
    """Both ends of every error bar."""
    ends = zip(series.points, series.errors, strict=False)
    return [end for (_, y), error in ends for end in (y - error, y + error)]


def _grid(y_axis: Axis) -> Iterator[str]:
    for tick in y_axis.ticks:
        kind = "zero" if tick == 0 else "grid"
        height = 100 - y_axis.place(tick)
        yield f'<path class="{kind}" d="M0 {height:.2f}H100"/>'


def _line(series: Series, x_axis: Axis, y_axis: Axis) -> str:
    places = [f"{x_axis.place(x):.2f} {100 - y_axis.place(y):.2f}" for x, y in series.points]
    style = f"s{series.style % NUM_STYLES}"
    line = f'<path class="line {style}" d="M{"L".join(places)}"/>'
    if not (series.dots or len(places) == 1):
        return line
    dots = "".join(f"M{place}h0" for place in places)  # a round cap, which nothing stretches
    bars = "".join(
        f"M{x_axis.place(x):.2f} {100 - y_axis.place(y - error):.2f}"
        f"V{100 - y_axis.place(y + error):.2f}"
        for (x, y), error in zip(series.points, series.errors, strict=False)
    )
    bar = f'<path class="bar {style}" d="{bars}"/>' if bars else ""
    return f'{line}{bar}<path class="dots {style}" d="{dots}"/>'


def _ticks(axis: Axis, name: str, side: str) -> Iterator[str]:
    for tick in axis.ticks:
        place = axis.place(tick)
        yield f'<span class="{name}" style="{side}:{place:.2f}%">{number(tick)}</span>'


def _legend(series: Sequence[Series]) -> str:
    if len(series) == 1 and not series[0].summary:
        return ""
    items = (
        f'<li><svg viewBox="0 0 22 8" aria-hidden="true"><path class="line s{each.style}" '
        f'd="M1 4H21"/></svg>{escape(each.name)}{_summary(each)}</li>'
        for each in series
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _summary(series: Series) -> str:
    return f" <b>{escape(series.summary)}</b>" if series.summary else ""


def _in_words(chart: Chart) -> str:
    lines = [
        f"{each.name} from {number(each.points[0][1])} to {number(each.points[-1][1])}, "
        f"at least {number(min(y for _, y in each.points))}, "
        f"at most {number(max(y for _, y in each.points))}"
        for each in chart.drawn()
    ]
    return f"{chart.title} by {chart.x_label}, {chart.y_label}: {'; '.join(lines)}"


def _values(chart: Chart, series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> str:
    """What hover.js needs: ends of the axes, and the points."""
    lines = [
        {
            "name": each.name,
            "style": each.style % NUM_STYLES,
            "points": [[float(f"{x:.6g}"), float(f"{y:.4g}")] for x, y in each.points],
        }
        for each in series
    ]
    ends = {"x": [x_axis.low, x_axis.high], "y": [y_axis.low, y_axis.high]}
    return json.dumps(ends | {"label": chart.x_label, "series": lines}, separators=(",", ":"))
