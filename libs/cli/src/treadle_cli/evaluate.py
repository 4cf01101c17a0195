"""`treadle eval RECIPE run.model=FOLDER`: scores a policy on the recipe's evaluation sets.

A run of no steps, in a directory of its own: the four services, the baseline, and the end. On
stdout one JSON object a measure; lines for people on stderr.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from treadle_cli import compose, train
from treadle_cli.rows import RunTail
from treadle_cli.standing import Standing
from treadle_runtime.config import BAD_CONFIGURATION, merge, parse_overrides
from treadle_runtime.measures import Measure, report


def main(argv: list[str]) -> int:
    """Scores; 1 when an episode failed for good, so that a score says less than it seems to."""
    parser = argparse.ArgumentParser(prog="treadle eval", description=main.__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    compose.add_overlay(parser)
    args = parser.parse_intermixed_args(argv)
    adapt = partial(score_only, overrides=args.overrides)
    ready = train.prepared(args.recipe, args.overrides, overlays=args.overlay, adapt=adapt)
    if ready is None:
        return BAD_CONFIGURATION
    plan, recipe = ready
    with contextlib.redirect_stdout(sys.stderr):
        status = asyncio.run(train.run(plan, recipe, plain=True))
    return status or report(_measures(plan))


def score_only(recipe: dict[str, Any], *, overrides: list[str]) -> None:
    """Makes a recipe one that only scores, in a directory of its own unless `overrides` name one.

    Raises RecipeError where nothing is to be scored.
    """
    merge(recipe, {"experience": {"steps": 0}})
    if not recipe["experience"].get("evaluation"):
        raise compose.RecipeError(["experience.evaluation: required, its sets are scored"])
    chosen = parse_overrides(overrides).get("run")
    if not isinstance(chosen, dict) or "dir" not in chosen:  # the recipe's is for training
        merge(recipe, {"run": {"dir": f"runs/eval-{time.strftime('%Y%m%d-%H%M%S')}"}})


def _measures(plan: compose.Plan) -> Iterator[Measure]:
    """Two a set; a score that there is not is none."""
    standing = Standing(0)
    for writer, row in RunTail(plan.directory).rows():
        standing.fold(writer, row)
    for name, (found,) in standing.scores.items():
        details = {"num_scored": found.num_scored, "std_error": found.std_error}
        if found.score is not None:
            yield Measure(f"heldout_{name}", found.score, "reward", details=details)
        yield Measure(f"heldout_{name}_failed", found.num_failed, "episodes", "== 0")
