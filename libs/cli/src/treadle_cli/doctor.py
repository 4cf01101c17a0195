"""`treadle doctor [RECIPE]`: looks at machine, installation and recipe before a run does."""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from treadle_cli import checkup, compose, inputs, preflight
from treadle_cli.checkup import Finding, State

_RUN = 28
"""Bytes of memory a parameter, at least: values, gradients and two moments of the trainer, what
the engine samples with, what arrives there, and what is on its way, each as float32."""
_ON_THE_WAY = 8
"""Bytes of shared memory a parameter: the version that is read and the one that is written."""


def main(argv: list[str]) -> int:
    """Prints one line for everything that a run needs; the status is 1 where there is a problem."""
    parser = argparse.ArgumentParser(prog="treadle doctor", description=main.__doc__)
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    compose.add_overlay(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_intermixed_args(argv)
    findings, plan = (
        recipe(args.recipe, args.overrides, args.overlay) if args.recipe else ([], None)
    )
    findings = [*machine(plan), *findings]
    for finding in findings:
        print(json.dumps(asdict(finding)) if args.json else _line(finding), flush=True)
    return int(any(finding.state is State.PROBLEM for finding in findings))


def recipe(
    path: Path, overrides: list[str], overlays: Sequence[Path] = ()
) -> tuple[list[Finding], compose.Plan | None]:
    """All that `treadle train` would refuse, and what it would run unless the recipe is wrong."""
    plan: compose.Plan | None = None
    try:
        values = compose.read_recipe(path, overlays=overlays, overrides=overrides)
        plan = compose.compose(values)
        found = [
            *inputs.check(plan.start, plan.services),
            *preflight.room(checkup.existing(plan.directory), plan.start),
            *preflight.surroundings(plan.services, plan.servers),
        ]
    except compose.RecipeError as error:
        found = error.found
    except (OSError, ValueError) as error:
        found = [str(error)]
    if not found:
        return [Finding("recipe", State.OK, f"{path} can be trained")], plan
    return [Finding("recipe", State.PROBLEM, problem) for problem in found], plan


def machine(plan: compose.Plan | None) -> list[Finding]:
    """What there is, against what the plan's policy needs where there is a plan."""
    directory = plan.directory if plan else Path.cwd()
    parameters = _parameters(plan.start) if plan else 0
    looks: list[Callable[[], Finding]] = [
        lambda: checkup.python(sys.version_info[:2]),
        checkup.libraries,
        lambda: checkup.cores(len(os.sched_getaffinity(0))),
        lambda: checkup.memory(checkup.available_memory(), _RUN * parameters),
        lambda: checkup.disk(directory),
        lambda: checkup.shared_memory(checkup.free_shared_memory(), _ON_THE_WAY * parameters),
        checkup.sockets,
        lambda: checkup.open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        lambda: checkup.clock(time.time(), checkup.written_at(directory)),
        checkup.gpu,
        checkup.local_servers,
    ]
    return [look() for look in looks]


def _parameters(model: Path) -> int:
    """Of a policy, from the size of its files and the type that its config names."""
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    wide = config.get("dtype", config.get("torch_dtype")) == "float32"
    return size // (4 if wide else 2)


def _line(finding: Finding) -> str:
    return f"{finding.state:<8} {finding.check:<14} {finding.text}"
