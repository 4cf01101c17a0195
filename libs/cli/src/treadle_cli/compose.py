"""Turns one recipe into one configuration for each service, and finds every problem first."""

import argparse
import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, Field, ValidationError

from treadle_cli import record, servers
from treadle_cli.conflicts import conflicts
from treadle_core.errors import InvalidFieldError
from treadle_runtime import sockets
from treadle_runtime.config import (
    RunId,
    RunSettings,
    ServiceConfig,
    merge,
    parse_overrides,
    problems,
    read_yaml,
)
from treadle_runtime.files import write_durably
from treadle_runtime.local_servers.server import LocalServer
from treadle_runtime.spelling import did_you_mean
from treadle_runtime.supervisor import HUNG_S

SERVICES = ("experience", "refit", "rollout", "trainer")
"""In the order in which they are started."""

SIDECAR = "payloads"
"""The payload sidecar, a process beside the services."""

RECIPE = "recipe.yaml"
"""File of a run directory: the whole recipe, which `treadle train` goes on with."""


class RunSection(RunSettings):
    """The `run` section of a recipe."""

    id: RunId | None = None
    """Each run is given one unless it is set."""
    hung_s: float = Field(default=HUNG_S, ge=5, allow_inf_nan=False)
    """Seconds for which a service that has served may be silent; then it is killed and started
    again."""


class RecipeError(ValueError):
    """Everything that is wrong with a recipe, a line for each."""

    def __init__(self, found: list[str]) -> None:
        super().__init__("\n".join(found))
        self.found = found


@dataclass(frozen=True, slots=True)
class Plan:
    """What `treadle train` is about to run."""

    run_id: str
    directory: Path
    start: Path
    """Hugging Face folder of the start parameters."""
    services: dict[str, dict[str, Any]]
    """Configuration of each service, as plain YAML values."""
    model: dict[str, str]
    """sha256 of what makes two policies the same but for their parameters, by file."""
    hung_s: float
    """As the recipe's `run.hung_s`."""
    sidecar: dict[str, Any] | None = None
    """Configuration of the payload sidecar, where the run is to have one of its own."""
    servers: tuple[LocalServer, ...] = ()
    """Those that the run is to have of its own, in the order in which they end."""

    @property
    def steps(self) -> int:
        """How many the run takes, unless its tasks end before."""
        return self.services["experience"]["steps"]


def add_overlay(parser: argparse.ArgumentParser) -> None:
    """Gives a command that takes a recipe the option `--overlay`."""
    parser.add_argument(
        "--overlay",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a partial recipe, laid over the recipe; may be given again, the later one wins",
    )


def read_recipe(
    path: Path, *, overlays: Sequence[Path] = (), overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """A recipe with its overlays, then its `dotted.key=value` overrides, laid over it in order.

    Raises OSError, and ValueError naming file and line for what is no recipe.
    """
    recipe = read_yaml(path)
    for overlay in overlays:
        merge(recipe, read_yaml(overlay))
    merge(recipe, parse_overrides(overrides))
    return recipe


def compose(recipe: dict[str, Any], *, allowed_changes: tuple[str, ...] = ()) -> Plan:
    """Validates the whole recipe and gives each service its part, addresses included.

    A run directory that holds a run keeps its id; the recipe must then be that run's, but for
    the keys in `allowed_changes`, unless that run never began.

    Raises:
        RecipeError: with every problem found.
    """
    if "demonstrations" in recipe:
        raise RecipeError(["demonstrations: this is a recipe of `treadle sft`, not of a run"])
    found = _unknown_sections(recipe)
    try:
        section = RunSection.model_validate(recipe.get("run", {}))
    except ValidationError as error:
        found += problems(error, RunSection, prefix="run")
        raise RecipeError(found) from error
    if not (section.model / "config.json").is_file():
        found.append(
            f"run.model: no Hugging Face folder at {section.model}; `treadle sft` makes one"
        )
    recorded = _recorded(section.dir)
    run_id = recorded["id"] if recorded else section.id or f"run-{uuid.uuid4().hex[:12]}"
    run = section.model_dump(mode="json", exclude={"hung_s"}) | {"id": run_id}
    own = servers.of_run(section.dir, run)
    sidecar = _sidecar(run, section.dir)
    services: dict[str, dict[str, Any]] = {}
    models: dict[str, BaseModel] = {}
    for name, schema in _schemas(*SERVICES).items():
        part: Any = recipe.get(name, {})
        if not isinstance(part, dict):
            found.append(f"{name}: expected a mapping, got {type(part).__name__}")
            continue
        services[name] = {"run": run, **_addresses(name, schema, section.dir)}
        services[name] |= cast("dict[str, Any]", part)
        if name == "experience":
            own += servers.of_ledger(section.dir, services[name])
        try:
            models[name] = schema.model_validate(services[name])
        except ValidationError as error:
            found += problems(error, schema, prefix=name)
    found += conflicts(models) + _problems_of_sidecar(sidecar)
    if recorded and not found and _has_begun(section.dir):
        found += _other_keys(section.dir, recorded, recipe, allowed_changes)
        if "run.model" not in allowed_changes:
            found += _other_files(section, recorded.get("model", {}))
    if found:
        raise RecipeError(found)
    model = _fingerprint(section.model)
    return Plan(run_id, section.dir, section.model, services, model, section.hung_s, sidecar, own)


def write(plan: Plan, recipe: dict[str, Any]) -> dict[str, Path]:
    """Lays out the run directory; returns the configuration file of each service."""
    for part in ("config", "logs", "metrics"):
        (plan.directory / part).mkdir(parents=True, exist_ok=True)
    for server in plan.servers:
        server.record()
    kept = {
        "id": plan.run_id,
        "recipe": recipe,
        "model": plan.model,
        "started_in": str(Path.cwd()),
    }
    write_durably(plan.directory / record.FILE_NAME, json.dumps(kept, indent=2).encode())
    write_durably(plan.directory / RECIPE, yaml.safe_dump(recipe, sort_keys=False).encode())
    paths: dict[str, Path] = {}
    sidecar = {SIDECAR: plan.sidecar} if plan.sidecar else {}
    for name, values in (plan.services | sidecar).items():
        Path(values["listen"].removeprefix("unix:")).parent.mkdir(parents=True, exist_ok=True)
        paths[name] = plan.directory / "config" / f"{name}.yaml"
        write_durably(paths[name], yaml.safe_dump(values, sort_keys=False).encode())
    return paths


def _sidecar(run: dict[str, Any], directory: Path) -> dict[str, Any] | None:
    """What the run's own payload sidecar is told, where it is to have one.

    All services are told where that one is.
    """
    payloads = run["payloads"]
    if payloads["name"] != "sidecar" or payloads.get("upload"):
        return None
    listen = _address(directory, SIDECAR)
    upload = str(sockets.path(directory, "upload"))
    of_its_own = ("directory", "archive", "budget_bytes", "ray")
    settings = {name: payloads[name] for name in of_its_own if name in payloads}
    run["payloads"] = payloads | {"upload": upload, "node": listen}
    return {
        "run": run,
        "listen": listen,
        "upload": upload,
        "experience_address": _address(directory, "experience"),
        **settings,
    }


def _problems_of_sidecar(settings: dict[str, Any] | None) -> list[str]:
    if settings is not None:
        schema = _schemas(SIDECAR)[SIDECAR]
        try:
            schema.model_validate(settings)
        except ValidationError as error:
            return problems(error, schema, prefix="run.payloads")
    return []


def _schemas(*names: str) -> dict[str, type[ServiceConfig]]:
    points = {point.name: point for point in entry_points(group="treadle.services")}
    missing = [name for name in names if name not in points]
    if missing:
        raise RecipeError([f"service {name} is not installed" for name in missing])
    return {name: points[name].load() for name in names}


def _unknown_sections(recipe: dict[str, Any]) -> list[str]:
    valid = ("run", *SERVICES)
    return [
        f"unknown key {name}{did_you_mean(name, valid)}" for name in recipe if name not in valid
    ]


def _addresses(service: str, schema: type[BaseModel], directory: Path) -> dict[str, str]:
    """Where a service listens, and where each peer does that it has a `<peer>_address` for."""
    peers = {
        f"{name}_address": _address(directory, name)
        for name in SERVICES
        if f"{name}_address" in schema.model_fields
    }
    return {"listen": _address(directory, service), **peers}


def _address(directory: Path, name: str) -> str:
    return f"unix:{sockets.path(directory, name)}"


def _recorded(directory: Path) -> dict[str, Any] | None:
    """None where no run lies. Raises RecipeError where its record is torn."""
    if not (directory / record.FILE_NAME).is_file():
        return None
    try:
        return record.read(directory)
    except InvalidFieldError as error:
        raise RecipeError([f"run.dir: {error}"]) from error


def _has_begun(directory: Path) -> bool:
    """False for a run that was started and ended before it had made its first checkpoint."""
    return not (directory / "lock").is_file() or (directory / "checkpoints").is_dir()


def _fingerprint(model: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256((model / name).read_bytes()).hexdigest()
        for name in ("config.json", "tokenizer.json")
        if (model / name).is_file()
    }


def _other_files(section: RunSection, recorded: dict[str, str]) -> list[str]:
    present = _fingerprint(section.model)
    return [
        f"run.model: {section.dir} was started with a {name} of sha256 {digest[:12]}, not of "
        f"{present.get(name, 'none')[:12]}; use another run.dir, or --allow-change run.model"
        for name, digest in recorded.items()
        if present.get(name) != digest
    ]


def _other_keys(
    directory: Path, recorded: dict[str, Any], recipe: dict[str, Any], allowed: tuple[str, ...]
) -> list[str]:
    before, after = _flat(recorded["recipe"]), _flat(json.loads(json.dumps(recipe, default=str)))
    return [
        f"{key}: {directory} was started with {before.get(key)!r}, not {after.get(key)!r}; "
        f"use another run.dir, or --allow-change {key}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and key not in allowed
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
