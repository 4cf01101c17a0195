"""`treadle train RECIPE`: starts the four services, shows how they do, and drains them."""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from treadle_cli import compose, preflight
from treadle_cli.progress import Progress
from treadle_runtime.config import BAD_CONFIGURATION, merge, parse_overrides, read_yaml
from treadle_runtime.files import LockHeldError, hold_lock
from treadle_runtime.supervisor import ChildFailedError, ChildSpec, Supervisor
from treadle_runtime.tracker import JsonlTracker

DRAIN_ORDER = ("rollout", "trainer", "refit", "experience")
_DRAIN_S = 35.0
"""A little more than a service takes for itself."""


def main(argv: list[str]) -> int:
    """Trains to the end of the recipe, or goes on with the run that its directory holds."""
    parser = argparse.ArgumentParser(prog="treadle train", description=main.__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="go on although this key of the recipe differs from the run's",
    )
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="treadle: %(message)s")
    try:
        recipe = read_yaml(args.recipe)
        merge(recipe, parse_overrides(args.overrides))
        plan = _planned(recipe, tuple(args.allow_change))
    except compose.RecipeError as error:
        sys.stderr.write("".join(f"{args.recipe}: {problem}\n" for problem in error.found))
        return BAD_CONFIGURATION
    except (OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return BAD_CONFIGURATION
    return asyncio.run(_train(plan, recipe))


def _planned(recipe: dict[str, Any], allowed_changes: tuple[str, ...]) -> compose.Plan:
    """What to run, where all of it can be; raises RecipeError."""
    plan = compose.compose(recipe, allowed_changes=allowed_changes)
    if lacking := preflight.check(plan.directory, plan.start):
        raise compose.RecipeError(lacking)
    return plan


async def _train(plan: compose.Plan, recipe: dict[str, Any]) -> int:
    try:
        hold_lock(plan.directory / "lock")
    except LockHeldError:
        sys.stderr.write(f"{plan.directory}: another `treadle train` runs it\n")
        return 1
    configs = compose.write(plan, recipe)
    supervisor = Supervisor(
        [_child(plan, name, configs[name]) for name in DRAIN_ORDER],
        JsonlTracker(plan.directory / "metrics" / "supervisor.jsonl"),
    )
    supervisor.start()
    print(f"run {plan.run_id} in {plan.directory}", flush=True)
    progress = Progress(plan.directory, plan.services["experience"].get("steps", 0))
    following = asyncio.ensure_future(progress.follow())
    try:
        return await _until_end(supervisor)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        progress.report()


async def _until_end(supervisor: Supervisor) -> int:
    interrupted = _interruption(supervisor)
    finished = asyncio.ensure_future(supervisor.until_done(["rollout", "trainer"]))
    await asyncio.wait([interrupted, finished], return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if interrupted.done():
        print("draining; Ctrl-C again ends at once", flush=True)
        status = 130
    elif error := finished.exception():
        if not isinstance(error, ChildFailedError):
            raise error
        sys.stderr.write(f"{error}\n")
        status = 1
    finished.cancel()
    await asyncio.gather(finished, return_exceptions=True)
    await supervisor.drain(grace_s=_DRAIN_S)
    return status


def _interruption(supervisor: Supervisor) -> "asyncio.Future[None]":
    """Done at the first SIGINT or SIGTERM; the second kills all children."""
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if interrupted.done():
            supervisor.kill()
        else:
            interrupted.set_result(None)

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal)
    return interrupted


def _child(plan: compose.Plan, name: str, config: Path) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-m", f"treadle_{name}.main", "--config", str(config)),
        log_path=plan.directory / "logs" / f"{name}.log",
    )
