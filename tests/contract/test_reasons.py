"""What a proto says of errors is what its service raises, and the other way round."""

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

from treadle_core.errors import Kind, TreadleError

PROTOS = Path(__file__).parent.parent.parent / "protos" / "treadle"
REASON = re.compile(r"\b[A-Z_]{2,}, ([A-Z]+(?:_[A-Z]+)+)")


OPTIONAL = ("nats", "ray", "redis")
"""Packages that only an adapter needs, in a module of its own."""


def listed(service: str) -> set[str]:
    text = (PROTOS / service / "v1" / f"{service}_service.proto").read_text()
    comments = " ".join(line.strip().lstrip("/ ") for line in text.splitlines() if "//" in line)
    return set(REASON.findall(comments))


def raised(package_name: str) -> set[str]:
    """Reasons of a package's errors, but for broken promises: no caller can handle those."""
    package = importlib.import_module(package_name)
    for module in pkgutil.walk_packages(package.__path__, f"{package_name}."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
    return {
        error.reason
        for error in _subclasses(TreadleError)
        if error.__module__.startswith(package_name)
        and hasattr(error, "reason")
        and error.kind is not Kind.BROKEN
    }


def _subclasses(parent: type) -> set[type]:
    children = set(parent.__subclasses__())
    return children | {grandchild for child in children for grandchild in _subclasses(child)}


PASSED_ON = {
    "experience": {"LEDGER_AWAY", "LEDGER_HELD", "LEDGER_LOST"},
    "refit": listed("experience"),
}
"""Reasons that are listed elsewhere, of another service that a service answers with, and those that
keep a process from starting, or end it: no caller sees them."""

LIBS = raised("treadle_core") | raised("treadle_payloads") | raised("treadle_weights")


@pytest.mark.parametrize("service", ["experience", "refit"])
def test_every_listed_reason_is_raised_and_every_raised_one_listed(service: str) -> None:
    own = raised(f"treadle_{service}.core")

    assert listed(service)
    assert listed(service) <= own | LIBS
    assert own <= listed(service) | PASSED_ON[service]


def test_every_reason_that_the_sidecar_lists_is_raised() -> None:
    assert listed("payload")
    assert listed("payload") <= LIBS
