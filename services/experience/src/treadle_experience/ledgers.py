"""Which ledger a run has: for the service that writes it, and for readers of its directory."""

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from treadle_core.errors import InvalidFieldError
from treadle_experience.adapters.sqlite import FILE_NAME
from treadle_experience.core.errors import LedgerAwayError, LedgerFormatError
from treadle_experience.ports import Ledger, Snapshot
from treadle_runtime.config import read_yaml
from treadle_runtime.local_servers import known as local_servers
from treadle_runtime.plugins import PluginConfig, PluginError, build

CONFIG = Path("config") / "experience.yaml"
"""What `treadle train` told the service, in the run's directory."""

EMBEDDED = PluginConfig(name="sqlite")
"""The ledger of a run that says nothing."""


def build_ledger(plugin: PluginConfig, run_dir: Path) -> Ledger:
    """The ledger that a run's configuration names; what it does not say follows from the run.

    Raises PluginError and InvalidFieldError for parameters that cannot be.
    """
    provided: dict[str, Any] = {}
    if plugin.name == "sqlite" and "path" not in plugin.parameters:
        provided["path"] = run_dir / FILE_NAME
    elif plugin.name == "redis":
        provided["run_dir"] = run_dir
    return build("treadle.ledgers", plugin, **provided)


def chosen(run_dir: Path) -> PluginConfig:
    """The ledger of the run in a directory, as its service was told; `EMBEDDED` without a word.

    Raises LedgerFormatError where what it was told cannot be read.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        return EMBEDDED
    try:
        told = read_yaml(path).get("ledger")
        return PluginConfig.model_validate(told) if told else EMBEDDED
    except (OSError, ValueError, ValidationError) as error:
        raise LedgerFormatError(f"{path}: {error}", field="ledger", value=path) from error


def has_ledger(run_dir: Path) -> bool:
    """Whether a run lies there whose ledger outlives its processes."""
    plugin = chosen(run_dir)
    return plugin.name != "memory" and (plugin != EMBEDDED or (run_dir / FILE_NAME).is_file())


def read_ledger(run_dir: Path) -> Snapshot:
    """One look at the ledger of the run in a directory, while it goes on or after.

    Raises LedgerFormatError where there is none, or it is damaged, and the errors of its adapter.
    """
    with opened(run_dir) as ledger:
        return ledger.read()


@contextlib.contextmanager
def opened(run_dir: Path) -> Generator[Ledger]:
    """The ledger of the run in a directory, and its server where the run has one of its own.

    Raises LedgerFormatError where there is none, InvalidFieldError where it cannot be built, and
    LedgerAwayError where its server cannot be started.
    """
    plugin = chosen(run_dir)
    if plugin == EMBEDDED and not (run_dir / FILE_NAME).is_file():
        path = run_dir / FILE_NAME
        raise LedgerFormatError(f"{path}: no ledger", field="ledger", value=path)
    try:
        ledger = build_ledger(plugin, run_dir)
    except PluginError as error:
        raise InvalidFieldError(
            "ledger", limit="a plugin that can be built", value=error
        ) from error
    address = str(plugin.parameters.get("url", ""))
    with contextlib.closing(ledger), contextlib.ExitStack() as served:
        try:
            served.enter_context(local_servers.running(run_dir, address))
        except local_servers.LocalServerError as error:
            raise LedgerAwayError(str(error), field="ledger.url", value=address) from error
        yield ledger
