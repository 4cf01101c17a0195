"""Typed configuration: YAML files, then command-line overrides, then validation.

Every problem is found at once and names the key, and the nearest valid one where a key is unknown.
"""

import argparse
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from treadle_core.ids import ID_PATTERN
from treadle_runtime.plugins import PluginConfig, importable, of_group
from treadle_runtime.spelling import did_you_mean

BAD_CONFIGURATION = 2
"""Exit status of a process whose configuration is wrong; restarting it cannot help."""

LOOPBACK = ("unix:", "127.0.0.1:", "localhost:", "[::1]:")
"""How an address begins that only this host reaches."""


RunTracker = Annotated[PluginConfig, AfterValidator(importable("treadle.trackers"))]
"""Where the numbers of a run go besides its metrics files."""

DoorbellConfig = Annotated[PluginConfig, AfterValidator(importable("treadle.doorbells"))]

PayloadsConfig = Annotated[PluginConfig, AfterValidator(of_group("treadle.payload_stores"))]

Addresses: TypeAlias = str | Annotated[tuple[str, ...], Field(min_length=1)]
"""Where a service is: one address, or those of all its processes, of which one serves."""

RunId = Annotated[str, Field(pattern=rf"^{ID_PATTERN.pattern}$")]


class Config(BaseModel):
    """Base of all configuration: frozen, and strict about names."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class RunSettings(Config):
    """What a recipe says of a run for all of its services."""

    dir: Path
    """The run's directory; relative to the working directory."""
    model: Path
    """Hugging Face folder of the start parameters, with the tokenizer."""
    seed: int = 0
    """Seed of everything random in the run."""
    otlp_endpoint: str = ""
    """Where spans are exported by OTLP over gRPC, as `http://host:4317`; empty: nowhere."""
    trackers: tuple[RunTracker, ...] = ()
    """Where the numbers go besides `RUN/metrics`, as `[{name: tensorboard}]`."""
    doorbell: DoorbellConfig = PluginConfig(name="poll")
    """Plugin of `treadle.doorbells`: what wakes those who wait for a change."""
    payloads: PayloadsConfig = PluginConfig(name="files")
    """Plugin of `treadle.payload_stores`: where heavy payloads of episodes lie."""
    inline_bytes: int = Field(default=65536, ge=0, le=65536)
    """Payloads of up to so many bytes lie in the ledger itself."""
    insecure_dev: bool = False
    """Lets services listen beyond loopback although calls are in the open: whoever reaches them can
    read and change the run. For a private network of containers on a developer's machine."""


class RunConfig(RunSettings):
    """What all services of a run have in common."""

    id: RunId
    """Names the run in the ledger and in all that is derived from it."""


class ServiceConfig(Config):
    """What every service is told."""

    run: RunConfig
    """The run that the service works for."""
    listen: str
    """Address to serve gRPC on: `unix:/path` or a loopback `host:port`; any `host:port` where
    `run.insecure_dev` is set."""

    @field_validator("listen")
    @classmethod
    def _on_loopback(cls, listen: str, info: ValidationInfo) -> str:
        run = info.data.get("run")  # missing: what is wrong with it is said
        if run is not None and not run.insecure_dev and not listen.startswith(LOOPBACK):
            raise ValueError(
                "expected unix:/path or a loopback host:port, since calls are in the open "
                "(run.insecure_dev allows it, on a private network)"
            )
        return listen


C = TypeVar("C", bound=Config)


def load(schema: type[C], argv: list[str] | None = None) -> C:
    """Reads `--config FILE` (repeatable, later wins) and `dotted.key=value` overrides.

    Prints every problem and exits with BAD_CONFIGURATION when there is one.
    """
    parser = argparse.ArgumentParser(description=schema.__doc__)
    parser.add_argument("--config", type=Path, action="append", default=[])
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    args = parser.parse_args(argv)
    try:
        merged: dict[str, Any] = {}
        for path in args.config:
            merge(merged, read_yaml(path))
        merge(merged, parse_overrides(args.overrides))
        return schema.model_validate(merged)
    except ValidationError as error:
        found = problems(error, schema)
    except (OSError, ValueError) as error:
        found = [str(error)]
    sys.stderr.write("".join(f"configuration: {problem}\n" for problem in found))
    raise SystemExit(BAD_CONFIGURATION)


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads one YAML mapping; raises ValueError naming file and line where it is none."""
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(  # noqa: TRY004, wrong content of a file, not of a call
            f"{path}: expected a mapping, got {type(content).__name__}"
        )
    return cast("dict[str, Any]", content)


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Turns `dotted.key=value` words into a nested mapping; values are YAML."""
    merged: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r}: expected dotted.key=value")
        nested: Any = yaml.safe_load(value)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        merge(merged, nested)
    return merged


def merge(base: dict[str, Any], update: Mapping[str, Any]) -> None:
    """Lays `update` over `base`, mapping by mapping.

    A mapping that names another plugin replaces the one before: their parameters do not mix.
    """
    for key, value in update.items():
        before = base.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            below, above = cast("dict[str, Any]", before), cast("dict[str, Any]", value)
            if above.get("name", below.get("name")) == below.get("name"):
                merge(below, above)
                continue
        base[key] = value


def problems(error: ValidationError, schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Says each problem in one line: the key, what is wrong, and the nearest valid key."""
    found: list[str] = []
    for detail in error.errors(include_url=False):
        where = ".".join([*([prefix] if prefix else []), *(str(part) for part in detail["loc"])])
        if detail["type"] == "extra_forbidden":
            found.append(f"unknown key {where}{_suggestion(schema, detail['loc'], prefix)}")
        elif detail["type"] == "missing":
            found.append(f"{where}: required")
        else:
            said = detail["msg"].removeprefix("Value error, ")  # a validator of ours says enough
            found.append(f"{where}: {said} (got {detail['input']!r})")
    return found


def _suggestion(schema: type[BaseModel], loc: tuple[int | str, ...], prefix: str) -> str:
    model: type[BaseModel] | None = schema
    for part in loc[:-1]:
        model = model and _nested(model, part)
    path = ".".join([*([prefix] if prefix else []), *(str(part) for part in loc[:-1])])
    valid = list(model.model_fields) if model else []
    return did_you_mean(str(loc[-1]), valid, f"{path}." if path else "")


def _nested(model: type[BaseModel], part: int | str) -> type[BaseModel] | None:
    """The model of a field (or of the elements of a list field), if it is one."""
    if isinstance(part, int):
        return model
    field = model.model_fields.get(part)
    return _model_in(field.annotation) if field else None


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    if get_origin(annotation) in (list, tuple, Union, types.UnionType):
        return next((found for arg in get_args(annotation) if (found := _model_in(arg))), None)
    return None
