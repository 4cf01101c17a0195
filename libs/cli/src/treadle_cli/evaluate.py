"""`treadle eval RECIPE run.model=FOLDER`: scores a policy on the recipe's evaluation sets.

A run of no steps, in a directory of its own: the four services, the baseline, and the end. On
stdout one JSON object a set (`evaluation`, `score`, `std_error`, `num_scored`, `num_failed`), a
score that there is not being null; lines for people on stderr.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from treadle_cli import compose, train
from treadle_cli.rows import RunTail
from treadle_cli.standing import Standing
from treadle_runtime.config import BAD_CONFIGURATION, merge, parse_overrides


def main(argv: list[str]) -> int:
    """Scores; 1 when an episode failed for good, so that a score says less than it seems to."""
    parser = argparse.ArgumentParser(prog="treadle eval", description=main.__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(argv)
    adapt = partial(score_only, overrides=args.overrides)
    ready = train.prepared(args.recipe, args.overrides, adapt=adapt)
    if ready is None:
        return BAD_CONFIGURATION
    plan, recipe = ready
    with contextlib.redirect_stdout(sys.stderr):
        status = asyncio.run(train.run(plan, recipe, plain=True))
    return status or _tell(plan)


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


def _tell(plan: compose.Plan) -> int:
    standing = Standing(0)
    for writer, row in RunTail(plan.directory).rows():
        standing.fold(writer, row)
    failed = 0
    for name, (score,) in standing.scores.items():
        print(json.dumps({"evaluation": name, **asdict(score)}))
        failed += score.num_failed
    return 1 if failed else 0
