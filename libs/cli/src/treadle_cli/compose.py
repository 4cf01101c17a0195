"""Turns one recipe into one configuration for each service, and finds every problem first."""

import hashlib
import json
import uuid
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError

from treadle_runtime.config import Config, ServiceConfig, did_you_mean, problems
from treadle_runtime.files import write_durably

SERVICES = ("experience", "refit", "rollout", "trainer")
"""In the order in which they are started."""

_SOCKET_PATH_LIMIT = 90
"""A unix socket's path may hold 107 bytes; the lock beside it needs a few more."""


class RunSection(Config):
    """The `run` section of a recipe: RunConfig, less the id, which each run is given."""

    dir: Path
    model: Path
    seed: int = 0
    otlp_endpoint: str = ""


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
    services: dict[str, dict[str, Any]]
    """Configuration of each service, as plain YAML values."""


def compose(recipe: dict[str, Any], *, allowed_changes: tuple[str, ...] = ()) -> Plan:
    """Validates the whole recipe and gives each service its part, addresses included.

    A run directory that holds a run keeps its id; the recipe must then be that run's, but for
    the keys in `allowed_changes`.

    Raises:
        RecipeError: with every problem found.
    """
    found = _unknown_sections(recipe)
    try:
        section = RunSection.model_validate(recipe.get("run", {}))
    except ValidationError as error:
        found += problems(error, RunSection, prefix="run")
        raise RecipeError(found) from error
    if not (section.model / "config.json").is_file():
        found.append(f"run.model: no Hugging Face folder at {section.model}")
    run_id = _run_id(section.dir)
    run = {"id": run_id, **section.model_dump(mode="json")}
    services: dict[str, dict[str, Any]] = {}
    for name, schema in _schemas().items():
        part: Any = recipe.get(name, {})
        if not isinstance(part, dict):
            found.append(f"{name}: expected a mapping, got {type(part).__name__}")
            continue
        services[name] = {
            "run": run,
            "listen": _address(section.dir, name),
            **_peers(schema, section.dir),
            **cast("dict[str, Any]", part),
        }
        found += _validated(schema, services[name], name)
    found += _changes(section.dir, recipe, allowed_changes)
    if found:
        raise RecipeError(found)
    return Plan(run_id, section.dir, services)


def write(plan: Plan, recipe: dict[str, Any]) -> dict[str, Path]:
    """Lays out the run directory; returns the configuration file of each service."""
    for part in ("config", "logs", "metrics"):
        (plan.directory / part).mkdir(parents=True, exist_ok=True)
    record = {"id": plan.run_id, "recipe": recipe}
    write_durably(plan.directory / "run.json", json.dumps(record, indent=2).encode())
    paths: dict[str, Path] = {}
    for name, values in plan.services.items():
        Path(values["listen"].removeprefix("unix:")).parent.mkdir(parents=True, exist_ok=True)
        paths[name] = plan.directory / "config" / f"{name}.yaml"
        write_durably(paths[name], yaml.safe_dump(values, sort_keys=False).encode())
    return paths


def _schemas() -> dict[str, type[ServiceConfig]]:
    points = {point.name: point for point in entry_points(group="treadle.services")}
    missing = [name for name in SERVICES if name not in points]
    if missing:
        raise RecipeError([f"service {name} is not installed" for name in missing])
    return {name: points[name].load() for name in SERVICES}


def _unknown_sections(recipe: dict[str, Any]) -> list[str]:
    valid = ("run", *SERVICES)
    return [
        f"unknown key {name}{did_you_mean(name, valid)}" for name in recipe if name not in valid
    ]


def _validated(schema: type[BaseModel], values: dict[str, Any], prefix: str) -> list[str]:
    try:
        schema.model_validate(values)
    except ValidationError as error:
        return problems(error, schema, prefix=prefix)
    return []


def _peers(schema: type[BaseModel], directory: Path) -> dict[str, str]:
    """A service that has a field `<peer>_address` is told where that peer listens."""
    return {
        f"{name}_address": _address(directory, name)
        for name in SERVICES
        if f"{name}_address" in schema.model_fields
    }


def _address(directory: Path, name: str) -> str:
    path = directory.resolve() / "sockets" / f"{name}.sock"
    if len(str(path)) > _SOCKET_PATH_LIMIT:
        digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
        path = Path("/tmp") / f"treadle-{digest}" / f"{name}.sock"  # noqa: S108, short on purpose
    return f"unix:{path}"


def _run_id(directory: Path) -> str:
    recorded = _record(directory)
    return recorded["id"] if recorded else f"run-{uuid.uuid4().hex[:12]}"


def _record(directory: Path) -> dict[str, Any] | None:
    path = directory / "run.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _changes(directory: Path, recipe: dict[str, Any], allowed: tuple[str, ...]) -> list[str]:
    recorded = _record(directory)
    if recorded is None:
        return []
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
