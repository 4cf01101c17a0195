"""What a proto says of errors is what its service raises, and the other way round."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from treadle_core.errors import TreadleError

PROTOS = Path(__file__).parent.parent.parent / "protos" / "treadle"
REASON = re.compile(r"\b[A-Z]{2,}, ([A-Z]+(?:_[A-Z]+)+)")


def listed(service: str) -> set[str]:
    text = (PROTOS / service / "v1" / f"{service}_service.proto").read_text()
    comments = " ".join(line.strip().lstrip("/ ") for line in text.splitlines() if "//" in line)
    return set(REASON.findall(comments))


def raised(service: str) -> set[str]:
    package = importlib.import_module(f"treadle_{service}.core")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    return {
        error.reason
        for error in _subclasses(TreadleError)
        if error.__module__.startswith(f"treadle_{service}.core") and hasattr(error, "reason")
    }


def _subclasses(parent: type) -> set[type]:
    children = set(parent.__subclasses__())
    return children | {grandchild for child in children for grandchild in _subclasses(child)}


SHARED = {"INVALID_FIELD", "PAYLOAD_CORRUPT"}
INTERNAL = {"LAG_BOUND_BROKEN"}
"""Broken promises of ours: INTERNAL, which no caller is meant to handle."""


@pytest.mark.parametrize("service", ["experience", "refit"])
def test_every_listed_reason_is_raised_and_every_raised_one_listed(service: str) -> None:
    assert raised(service) - INTERNAL - SHARED == listed(service) - SHARED
