"""`treadle train RECIPE`: starts the four services, shows how they do, and drains them."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from treadle_cli import compose, inputs, preflight, servers
from treadle_cli.live import Screen, can_draw
from treadle_cli.progress import Progress
from treadle_cli.report import command as report
from treadle_cli.standing import HOPELESS
from treadle_runtime import sockets
from treadle_runtime.config import BAD_CONFIGURATION
from treadle_runtime.files import LockHeldError, hold_lock
from treadle_runtime.local_servers.server import LocalServerError
from treadle_runtime.supervisor import ChildFailedError, ChildSpec, Supervisor
from treadle_runtime.tracker import JsonlTracker

log = logging.getLogger(__name__)

DRAIN_ORDER = ("rollout", "trainer", "refit", "experience")
_DRAIN_S = 35.0
"""A little more than a service takes for itself."""
_LOOK_S = 0.4
"""Time between two looks at what the services say."""


def main(argv: list[str]) -> int:
    """Trains to the end of the recipe, or goes on with the run that its directory holds."""
    parser = argparse.ArgumentParser(prog="treadle train", description=main.__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    compose.add_overlay(parser)
    parser.add_argument(
        "--allow-change",
        action="append",
        default=[],
        metavar="KEY",
        help="go on although this key of the recipe differs from the run's",
    )
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")
    args = parser.parse_intermixed_args(argv)
    ready = prepared(
        args.recipe,
        args.overrides,
        overlays=args.overlay,
        allowed_changes=tuple(args.allow_change),
    )
    if ready is None:
        return BAD_CONFIGURATION
    plan, recipe = ready
    status = asyncio.run(run(plan, recipe, plain=args.plain or not can_draw(sys.stdout)))
    if status == 0:
        _report(plan.directory)
    return status


def _report(directory: Path) -> None:
    """Writes the report of a run that is through, which is well whatever becomes of that."""
    try:
        print(f"report in {report.write(directory)}", flush=True)
    except Exception as error:  # noqa: BLE001, transcripts are a plugin's
        log.warning("no report: %r", error)


def prepared(
    path: Path,
    overrides: list[str],
    *,
    overlays: Sequence[Path] = (),
    adapt: Callable[[dict[str, Any]], None] = lambda _: None,
    allowed_changes: tuple[str, ...] = (),
    elsewhere: bool = False,
) -> tuple[compose.Plan, dict[str, Any]] | None:
    """What to run, and its recipe, where all of it can be; else says on stderr all that is wrong.

    `adapt` changes the recipe before it is judged. What is to run `elsewhere` needs nothing of this
    host but what the recipe names.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="treadle: %(message)s")
    try:
        recipe = compose.read_recipe(path, overlays=overlays, overrides=overrides)
        adapt(recipe)
        plan = compose.compose(recipe, allowed_changes=allowed_changes)
        lacking = inputs.check(plan.start, plan.services)
        lacking += preflight.check(plan.directory, plan.start)
        if not elsewhere:
            lacking += preflight.surroundings(plan.services, plan.servers)
        if lacking:
            raise compose.RecipeError(lacking)  # noqa: TRY301, told like all that is wrong
    except compose.RecipeError as error:
        sys.stderr.write("".join(f"{path}: {problem}\n" for problem in error.found))
        return None
    except OSError as error:
        sys.stderr.write(f"{error.filename or path}: {error.strerror}, from {Path.cwd()}\n")
        return None
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return None
    return plan, recipe


async def run(plan: compose.Plan, recipe: dict[str, Any], *, plain: bool) -> int:
    """Runs the services to the end of the plan, or until a signal; returns the exit status."""
    try:
        hold_lock(plan.directory / "lock")
    except LockHeldError:
        sys.stderr.write(f"{plan.directory}: another `treadle train` runs it\n")
        return 1
    configs = compose.write(plan, recipe)
    tracker = JsonlTracker(plan.directory / "metrics" / "supervisor.jsonl")
    children = [_child(plan, name, configs[name]) for name in DRAIN_ORDER]
    if plan.sidecar:  # all others need it to the end
        children.append(_sidecar(plan, configs[compose.SIDECAR]))
    children += map(servers.child, plan.servers)
    supervisor = Supervisor(children, tracker, hung_s=plan.hung_s)
    with _display(plan, plain=plain) as display:
        if not await _started(supervisor, plan):
            return 1
        hopeless: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        following = asyncio.ensure_future(_follow(display, hopeless))
        try:
            status = await _until_end(supervisor, hopeless)
            tracker.log("end", {"status": status})
            return status
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            display.report()
            sockets.remove(plan.directory)
            for server in plan.servers:
                server.clean()


async def _started(supervisor: Supervisor, plan: compose.Plan) -> bool:
    """Starts everything, servers first; False, with all ended, where one does not answer."""
    for server in plan.servers:
        os.environ.update(server.for_clients())
    names = [server.name for server in plan.servers]
    supervisor.start(names)
    try:
        await servers.until_ready(plan.servers)
    except LocalServerError as error:
        log.error("%s", error)  # noqa: TRY400, it says enough
        await supervisor.drain(grace_s=_DRAIN_S)
        return False
    supervisor.start()
    return True


def _display(
    plan: compose.Plan, *, plain: bool
) -> contextlib.AbstractContextManager[Progress | Screen]:
    if not plain:
        return Screen(plan)
    print(f"run {plan.run_id} in {plan.directory}", flush=True)
    return contextlib.nullcontext(Progress(plan.directory, plan.steps))


async def _follow(display: Progress | Screen, hopeless: "asyncio.Future[str]") -> None:
    """Shows what is new until it is cancelled; `hopeless` is done with why, where it is."""
    while True:
        display.report()
        if display.standing.is_hopeless and not hopeless.done():
            hopeless.set_result(display.standing.why)
        await asyncio.sleep(_LOOK_S)


async def _until_end(supervisor: Supervisor, hopeless: "asyncio.Future[str]") -> int:
    interrupted = _interruption(supervisor)
    finished = asyncio.ensure_future(supervisor.until_done(["rollout", "trainer"]))
    ends: list[asyncio.Future[Any]] = [interrupted, finished, hopeless]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if interrupted.done():
        log.warning("draining; Ctrl-C again ends at once")
        status = 130
    elif hopeless.done():
        log.error(
            "the first %d attempts all failed in the agent or its grader, the newest with: %s; "
            "mend it, and the same command goes on",
            HOPELESS,
            hopeless.result(),
        )
        status = 1
    elif error := finished.exception():
        if not isinstance(error, ChildFailedError):
            raise error
        log.error("%s", error)
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


def _sidecar(plan: compose.Plan, config: Path) -> ChildSpec:
    return ChildSpec(
        name=compose.SIDECAR,
        command=(sys.executable, "-m", "treadle_payloads.sidecar", "--config", str(config)),
        log_path=plan.directory / "logs" / f"{compose.SIDECAR}.log",
        address=plan.sidecar["listen"] if plan.sidecar else "",
    )


def _child(plan: compose.Plan, name: str, config: Path) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=(sys.executable, "-m", f"treadle_{name}.main", "--config", str(config)),
        log_path=plan.directory / "logs" / f"{name}.log",
        address=plan.services[name]["listen"],
    )
