"""`treadle replay RECIPE --from OUT`: trains on the groups that `treadle export` wrote, alone.

No services and no sampling: the recipe's `run.model` and `trainer` section, and the recorded steps
in their order. With the recipe of the run and its start parameters losses are those of the run, bit
for bit (one rank, CPU). On stdout one JSON object a measure.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from google.protobuf import json_format
from pydantic import ValidationError

from treadle.experience.v1 import experience_service_pb2 as experience_pb
from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_payloads.files import FileStore
from treadle_runtime.config import BAD_CONFIGURATION, merge, parse_overrides, problems, read_yaml
from treadle_runtime.measures import Measure, report
from treadle_runtime.plugins import PluginError
from treadle_trainer import training, wire
from treadle_trainer.adapters import folders
from treadle_trainer.adapters.payload_reader import StoredPayloads
from treadle_trainer.config import TrainerConfig
from treadle_trainer.core.claims import Claim
from treadle_trainer.core.metrics import step_metrics
from treadle_trainer.main import recipe_of
from treadle_trainer.ports import Backend
from treadle_trainer.recipe import Recipe

FORMAT = 1
COMPARED = ("loss", "grad_norm", "trained_tokens", "reward")
"""Numbers of a step that are compared with those that the run reported."""

_NOWHERE = {"listen": "unix:/", "experience_address": "unix:/", "refit_address": "unix:/"}
"""Addresses of services that are not there."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step as the export holds it."""

    step: int
    claim: Claim
    metrics: Mapping[str, float]
    """As the run reported them; may be empty."""


def main(argv: list[str]) -> int:
    """Returns 0; 1 where a step cannot be trained, or `--equal` does not hold."""
    parser = argparse.ArgumentParser(prog="treadle replay", description=__doc__)
    parser.add_argument("recipe", type=Path, help="a recipe of `treadle train`")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--from", dest="export", type=Path, required=True, metavar="OUT")
    parser.add_argument("--output", type=Path, help="folder for the parameters at the end")
    parser.add_argument(
        "--equal", action="store_true", help="fail where a number is not that of the run"
    )
    args = parser.parse_intermixed_args(argv)
    try:
        recipe = recipe_of(config_of(args.recipe, args.overrides))
        backend, unequal, taken = replay(recipe, args.export)
        if args.output is not None:
            _save(backend, args.output)
    except ValidationError as error:
        found = problems(error, TrainerConfig, prefix="trainer")
        sys.stderr.write("".join(f"{args.recipe}: {problem}\n" for problem in found))
        return BAD_CONFIGURATION
    except (TreadleError, PluginError, OSError, ValueError) as error:
        sys.stderr.write(f"treadle replay: {error}\n")
        return 1
    goal = "== 0" if args.equal else "none"
    steps = Measure("replayed_steps", taken, "steps", ">= 1")
    return report([steps, Measure("unequal_steps", unequal, "steps", goal)])


def config_of(path: Path, overrides: list[str]) -> TrainerConfig:
    """What a recipe says of the trainer. Raises ValidationError, ValueError or OSError."""
    recipe = read_yaml(path)
    merge(recipe, parse_overrides(overrides))
    run = {key: value for key, value in recipe.get("run", {}).items() if key != "hung_s"}
    values = {**_NOWHERE, **recipe.get("trainer", {}), "run": {"id": "replay", **run}}
    return TrainerConfig.model_validate(values)


def replay(recipe: Recipe, export: Path) -> tuple[Backend, int, int]:
    """Trains; returns the backend, how many steps differ from the record, and how many there were.

    Raises TreadleError where a step cannot be trained on.
    """
    payloads = StoredPayloads(FileStore(export / "payloads"))
    backend = recipe.build_backend(recipe.start)
    unequal = taken = 0
    for recorded in read_steps(export):
        step, claim = recorded.step, recorded.claim
        result = training.train(claim, step=step, recipe=recipe, backend=backend, payloads=payloads)
        found = step_metrics(claim, result, step=step)
        other = {
            name: (recorded.metrics[name], found.get(name))
            for name in COMPARED
            if name in recorded.metrics and recorded.metrics[name] != found.get(name)
        }
        taken += 1
        unequal += bool(other)
        said = f"; the run had another {', '.join(other)}" if other else ""
        sys.stderr.write(f"step {step} loss {result.loss:.6f}{said}\n")
    return backend, unequal, taken


def read_steps(export: Path) -> Iterator[RecordedStep]:
    """The steps of an export, in order. Raises InvalidFieldError where it is damaged, or none."""
    for number in _head(export)["steps"]:
        path = export / "steps" / f"{number:06d}.jsonl"
        try:
            head, *rows = path.read_text(encoding="utf-8").splitlines()
            told: dict[str, Any] = json.loads(head)
            tasks = [json_format.Parse(row, experience_pb.ClaimedTask()) for row in rows]
            message = experience_pb.ClaimStepResponse(tasks=tasks, last=told["last"])
            yield RecordedStep(told["step"], wire.claim_from_wire(message), told["metrics"])
        except (OSError, ValueError, KeyError, json_format.ParseError) as error:
            limit = "a step as `treadle export` writes it"
            raise InvalidFieldError(str(path), limit=limit, value=repr(error)) from error


def _head(export: Path) -> dict[str, Any]:
    path = export / "export.json"
    try:
        head: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFieldError(str(path), limit="an export", value=repr(error)) from error
    told = cast("dict[str, Any]", head) if isinstance(head, dict) else {}
    if told.get("format") != FORMAT:
        raise InvalidFieldError(str(path), limit=f"format {FORMAT}", value=told.get("format"))
    return told


def _save(backend: Backend, output: Path) -> None:
    with folders.aside(output.resolve().parent) as folder:
        backend.save_policy(folder)
        folders.install(folder, output.resolve())
