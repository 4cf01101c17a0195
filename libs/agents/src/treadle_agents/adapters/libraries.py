"""The library behind an adapter: imported when it is needed, and named where it is missing."""

from importlib import import_module
from typing import Any

from treadle_core.errors import InvalidFieldError


def library(name: str, *, extra: str) -> Any:
    """Imports module `name`. Raises InvalidFieldError naming the extra that it comes with."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise InvalidFieldError(
            "agent.name", limit=f'{extra} (pip install "treadle-agents[{extra}]")', value=error
        ) from error
