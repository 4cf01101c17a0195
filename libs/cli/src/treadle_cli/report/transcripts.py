"""The same held-out tasks before and after, as HTML.

Who owns the transcripts gives them by the entry points `treadle.transcripts`: a function of a run's
directory and the name of an evaluation set. It returns a list of {"task", "before", "after"}: the
task as JSON; each side {"step", "reward" (or None), "termination", "pieces"}; and the pieces
{"role": "prompt" | "policy" | "observation", "text", "versions"}.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

Pair = dict[str, Any]

GROUP = "treadle.transcripts"
_SHOWN = (("better", 3), ("worse", 2), ("no better", 2), ("as good", 1))
"""How many pairs of each kind a report shows."""
_MARKUP = re.compile(r"(&lt;\|[^|\s]{1,40}\|&gt;)")


def read(run: Path, evaluation: str) -> list[Pair]:
    """All pairs of an evaluation set; none where nobody has transcripts of it."""
    for point in entry_points(group=GROUP):
        told: Callable[[Path, str], list[Pair]] = point.load()
        if pairs := told(run, evaluation):
            return pairs
    return []


def kind(pair: Pair, best: float) -> str:
    """What became of a task. `best` is the highest reward of all; no reward is the lowest."""
    before, after = _worth(pair["before"]), _worth(pair["after"])
    if after != before:
        return "better" if after > before else "worse"
    return "as good" if after >= best else "no better"


def cards(pairs: Sequence[Pair]) -> str:
    """Some pairs of each kind, and how many there are of it."""
    best = max(_worth(pair[side]) for pair in pairs for side in ("before", "after"))
    kinds = {name: [each for each in pairs if kind(each, best) == name] for name, _ in _SHOWN}
    steps = " and ".join(str(pairs[0][side]["step"]) for side in ("before", "after"))
    counts = ", ".join(f"{len(found)} {name}" for name, found in kinds.items())
    shown = "".join(_card(each, name) for name, most in _SHOWN for each in kinds[name][:most])
    return f"<p>{len(pairs)} tasks, scored at steps {steps}: {counts}.</p>{shown}"


def _worth(side: dict[str, Any]) -> float:
    return float("-inf") if side["reward"] is None else side["reward"]


def _card(pair: Pair, name: str) -> str:
    prompt = next(
        (each["text"] for each in pair["after"]["pieces"] if each["role"] == "prompt"),
        json.dumps(pair["task"], ensure_ascii=False),
    )
    sides = "".join(_side(pair[side], side) for side in ("before", "after"))
    kind = name.replace(" ", "-")
    return (
        f'<article class="pair"><header><span class="kind {kind}">{name}</span>'
        f'<div class="said">{_text(prompt)}</div></header>'
        f'<div class="sides">{sides}</div></article>'
    )


def _side(side: dict[str, Any], name: str) -> str:
    reward = "no reward" if side["reward"] is None else f"reward {side['reward']:g}"
    ended = "" if side["termination"] == "finished" else f", {escape(side['termination'])}"
    said = "".join(_pieces(side["pieces"]))
    head = f"<h4>{name} <small>step {side['step']} · {reward}{ended}</small></h4>"
    return f"<section>{head}{said}</section>"


def _pieces(pieces: Sequence[dict[str, Any]]) -> Iterator[str]:
    for number, piece in enumerate(pieces):
        if number or piece["role"] != "prompt":
            role = escape(piece["role"])
            yield f'<div class="piece {role}"><b>{role}</b>'
            yield f'<div class="said">{_text(piece["text"])}</div></div>'


def _text(text: str) -> str:
    """Markup of the chat format is there, and dim."""
    return _MARKUP.sub(r"<i>\1</i>", escape(text))
