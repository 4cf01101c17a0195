"""Finds implementations by name; built-ins and third parties alike.

A name is an entry point of the group, or `package.module:Attribute`, or `path/file.py:Attribute`
(relative to the working directory; such a file may import its neighbours).
"""

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidationError, validate_call

from treadle_runtime.spelling import did_you_mean


class PluginConfig(BaseModel):
    """`name` picks the plugin; every other key is a parameter of its constructor."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str

    @property
    def parameters(self) -> dict[str, Any]:
        """What the recipe gives the constructor."""
        return dict(self.model_extra or {})


class PluginError(ValueError):
    """A plugin that does not exist, or does not take the parameters it is given."""


def build(group: str, config: PluginConfig, **provided: Any) -> Any:
    """Builds the plugin `config.name` of `group`, type-checking its parameters.

    `provided` are parameters that the service adds to those of the recipe.

    Raises:
        PluginError: naming the plugin, the parameter and what is valid.
    """
    return factory(group, config, **provided)()


def factory(group: str, config: PluginConfig, **provided: Any) -> Callable[[], Any]:
    """Finds a plugin of which many instances are made; each call is a `build`."""
    plugin = load(group, config.name)
    parameters = {**config.parameters, **provided}
    if plugin.__init__ is object.__init__:
        if parameters:
            raise PluginError(f"plugin {config.name!r} of {group} takes no {sorted(parameters)[0]}")
        return cast("Callable[[], Any]", plugin)
    constructor = cast("Callable[..., None]", plugin.__init__)
    checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(constructor)

    def make() -> Any:
        instance = plugin.__new__(plugin)
        try:
            checked(instance, **parameters)
        except ValidationError as error:
            details = "; ".join(
                f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
                for item in error.errors(include_url=False)
            )
            raise PluginError(f"plugin {config.name!r} of {group}: {details}") from error
        return instance

    return make


def load(group: str, name: str) -> Any:
    """Imports what `name` stands for in `group`; raises PluginError where there is nothing."""
    if ":" not in name:
        return _entry_point(group, name).load()
    where, _, attribute = name.rpartition(":")
    module = _module_of_file(Path(where)) if where.endswith(".py") else _import(where)
    if not hasattr(module, attribute):
        raise PluginError(f"{where} has no {attribute!r}{did_you_mean(attribute, dir(module))}")
    return getattr(module, attribute)


def check(group: str, config: PluginConfig) -> list[str]:
    """Says what is wrong with a plugin's name and parameter names, importing no plugin.

    Parameter names are read from the source, so that checking an engine does not import torch.
    """
    try:
        source, attribute = _source(group, config.name)
    except PluginError as error:
        return [str(error)]
    valid = _parameters(source, attribute)
    if valid is None:
        return []
    return [
        f"unknown key {name} of plugin {config.name!r}{did_you_mean(name, valid)}"
        for name in config.parameters
        if name not in valid
    ]


def of_group(group: str) -> Callable[[PluginConfig], PluginConfig]:
    """Validator of a configuration field: the plugin exists and takes the keys it is given."""

    def checked(config: PluginConfig) -> PluginConfig:
        if found := check(group, config):
            raise ValueError("; ".join(found))
        return config

    return checked


def importable(group: str) -> Callable[[PluginConfig], PluginConfig]:
    """Validator as `of_group`, which imports the plugin too, so that a missing package shows."""

    def checked(config: PluginConfig) -> PluginConfig:
        of_group(group)(config)
        try:
            load(group, config.name)
        except ImportError as error:
            raise ValueError(f"plugin {config.name!r} cannot be imported: {error}") from error
        return config

    return checked


def _entry_point(group: str, name: str) -> EntryPoint:
    found = _installed(group)
    if name not in found:
        raise PluginError(f"no plugin named {name!r} in {group}{did_you_mean(name, list(found))}")
    return found[name]


@cache  # every episode may ask, and looking through what is installed takes milliseconds
def _installed(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def _source(group: str, name: str) -> tuple[Path, str]:
    if ":" not in name:
        name = _entry_point(group, name).value
    where, _, attribute = name.rpartition(":")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise PluginError(f"{where}: no such file (plugin {name!r} of {group})")
        return Path(where), attribute
    try:
        spec = importlib.util.find_spec(where)
    except ModuleNotFoundError:
        spec = None
    if spec is None or spec.origin is None:
        raise PluginError(f"no module named {where!r} (plugin {name!r} of {group})")
    return Path(spec.origin), attribute


def _parameters(source: Path, attribute: str) -> list[str] | None:
    """Constructor parameters of a class by its source; None where they cannot be told."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise PluginError(f"{source}:{error.lineno}: {error.msg}") from error
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            return _class_parameters(node)
    return None


def _class_parameters(node: ast.ClassDef) -> list[str] | None:
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            if item.args.kwarg:
                return None
            return [arg.arg for arg in [*item.args.args[1:], *item.args.kwonlyargs]]
    if any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list):
        return [
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        ]
    return None


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise PluginError(f"no module named {name!r}") from error


def _module_of_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    if not resolved.is_file():
        raise PluginError(f"{path}: no such file")
    name = f"treadle_plugin_{resolved.stem}_{abs(hash(resolved)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise PluginError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    if str(resolved.parent) not in sys.path:
        sys.path.append(str(resolved.parent))  # last: a file's neighbours hide nothing installed
    sys.modules[name] = module  # dataclasses look their own module up while it is executed
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
