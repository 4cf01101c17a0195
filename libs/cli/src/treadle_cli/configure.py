"""`treadle configure RECIPE`: writes a run's directory for services that others start.

The directory then holds `config/experience.yaml` and so on, one for each service, as `treadle
train` would write them. Containers, or processes on several hosts, are started from these.
"""

import argparse
import sys
from pathlib import Path

from treadle_cli import compose, train
from treadle_runtime.config import BAD_CONFIGURATION
from treadle_runtime.files import LockHeldError, hold_lock


def main(argv: list[str]) -> int:
    """Prints the files; says all that is wrong with the recipe where something is."""
    parser = argparse.ArgumentParser(prog="treadle configure", description=main.__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    compose.add_overlay(parser)
    args = parser.parse_intermixed_args(argv)
    ready = train.prepared(args.recipe, args.overrides, overlays=args.overlay, elsewhere=True)
    if ready is None:
        return BAD_CONFIGURATION
    plan, recipe = ready
    if unplaced := [server.name for server in plan.servers] + ["sidecar"] * bool(plan.sidecar):
        said = "the recipe gives no address of it, and only `treadle train` starts one"
        sys.stderr.write("".join(f"{args.recipe}: {name}: {said}\n" for name in unplaced))
        return BAD_CONFIGURATION
    try:
        hold_lock(plan.directory / "lock")
    except LockHeldError:
        sys.stderr.write(f"{plan.directory}: a `treadle train` runs it\n")
        return 1
    for path in compose.write(plan, recipe).values():
        print(path)
    return 0
