"""The page: a head with the numbers that matter, the curves, the transcripts, the recipe."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from typing import Any

import yaml

from treadle_cli.report import charts, curves, transcripts
from treadle_cli.report.curves import Rows

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""The page asks nobody for anything."""


def page(record: dict[str, Any], rows: Rows, pairs: Sequence[transcripts.Pair]) -> str:
    """The whole file, from the run's record (run.json), its metrics and its transcripts."""
    recipe = record["recipe"]
    body = "".join(
        [
            _head(record, rows),
            f'<section class="tiles">{"".join(_tiles(recipe, rows))}</section>',
            _section("What it learned", _charts(curves.learning(rows))),
            _section("Before and after", transcripts.cards(pairs)) if pairs else "",
            _section("How the services worked", _charts(curves.speed(rows))),
            _deaths(rows),
            _recipe(recipe),
        ]
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(record["id"])}</title>'
        f"<style>{_asset('style.css')}</style></head><body><main>{body}</main>"
        f"<script>{_asset('hover.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return (files(__package__ or "") / name).read_text(encoding="utf-8")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _charts(drawn: Sequence[charts.Chart]) -> str:
    return f'<div class="charts">{"".join(map(charts.draw, drawn))}</div>'


def _head(record: dict[str, Any], rows: Rows) -> str:
    recipe = record["recipe"]
    began = f", began {_day(rows[0][1]['time'])}" if rows else ""
    size = max((row["bytes"] for row in curves.of(rows, "refit", "version")), default=0)
    policy = f"{recipe['run']['model']}" + (f" ({size / 1e6:.1f} MB)" if size else "")
    return (
        f"<header><h1>{escape(record['id'])}</h1>"
        f"<p>Treadle run in {escape(str(recipe['run']['dir']))}{began}. "
        f"Policy: {escape(policy)}. {escape(_plan(recipe))}."
        f"{escape(_durability(rows))}</p></header>"
    )


def _durability(rows: Rows) -> str:
    """What the ledger declared last."""
    counts = [row for row in curves.of(rows, "experience", "counts") if "durability" in row]
    said = counts[-1]["durability"] if counts else ""
    lossy = " (lossy)" if said in ("none", "process") else ""
    return f" Durability of the ledger: {said}{lossy}." if said else ""


def _plan(recipe: dict[str, Any]) -> str:
    experience, trainer = recipe.get("experience", {}), recipe.get("trainer", {})
    tasks, episodes = experience.get("tasks_per_step"), experience.get("group_size")
    advantage = trainer.get("advantage", {}).get("name", "")
    loss = trainer.get("loss", {}).get("name", "")
    said = f"{tasks} tasks of {episodes} episodes a step"
    parts = [said, f"lag at most {experience.get('max_lag')}", advantage, loss]
    return ", ".join(filter(None, parts))


def _tiles(recipe: dict[str, Any], rows: Rows) -> Iterator[str]:
    scored = curves.of(rows, "experience", "evaluation")
    for name in dict.fromkeys(row["evaluation"] for row in scored):
        scores = [r["score"] for r in scored if r["evaluation"] == name and "score" in r]
        if scores:
            first, last = f"{scores[0]:.3f}", f"{scores[-1]:.3f}"
            yield _tile(f"held-out {name}", last, f"{first} at the start")
    trained = curves.steps(rows)
    wanted = recipe.get("experience", {}).get("steps", 0)
    lag = max((row["lag_max"] for row in trained), default=0)
    yield _tile("steps", f"{trained[-1]['step'] if trained else 0} of {wanted}", f"lag up to {lag}")
    episodes = sum(row["num_episodes"] for row in trained)
    tokens = sum(row["tokens"] for row in trained)
    yield _tile("episodes trained", f"{episodes:,}", f"{tokens:,} tokens")
    seconds = curves.running_time(rows)(rows[-1][1]["time"]) if rows else 0.0
    lives = len({row["pid"] for row in curves.of(rows, "supervisor", "start")})
    yield _tile("running time", _duration(seconds), f"{lives} processes")
    versions = curves.of(rows, "refit", "version")
    aliases = sum(row["aliased"] for row in versions)
    behind = sum(row["left_behind"] for row in versions)
    yield _tile("versions", str(len(versions)), f"{aliases} aliases, {behind} left behind")
    deaths = len(curves.of(rows, "supervisor", "death"))
    yield _tile("deaths", str(deaths), "of services, unplanned" if deaths else "of services")


def _tile(label: str, value: str, more: str) -> str:
    return f"<div><p>{escape(label)}</p><b>{escape(value)}</b><p>{escape(more)}</p></div>"


def _deaths(rows: Rows) -> str:
    deaths = curves.of(rows, "supervisor", "death")
    if not deaths:
        return ""
    cells = "".join(
        f"<tr><td>{_day(row['time'])}<td>{escape(row['service'])}"
        f"<td>{escape(row['signal'] or 'status ' + str(row['status']))}"
        f"<td>{_duration(row['lived_s'])}<td>{escape(row['last_line'])}</tr>"
        for row in deaths
    )
    head = "<tr><th>when<th>service<th>how<th>lived<th>last line of its log</tr>"
    return _section("Deaths", f'<div class="scroll"><table>{head}{cells}</table></div>')


def _recipe(recipe: dict[str, Any]) -> str:
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    return f"<details><summary>Recipe</summary><pre>{escape(text)}</pre></details>"


def _day(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _duration(seconds: float) -> str:
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
