"""The list that `treadle failpoints` prints is what the services' code calls."""

import re
from pathlib import Path

import pytest

from treadle_cli import failpoints

ROOT = Path(__file__).parents[3]
FILES = [*ROOT.glob("services/*/src/**/*.py"), *ROOT.glob("libs/payloads/src/**/*.py")]


def test_the_list_is_every_call_in_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    called = [
        name
        for path in FILES
        for name in re.findall(r'\bfailpoint\(\s*"([^"]+)"', path.read_text())
    ]

    assert failpoints.main([]) == 0

    assert capsys.readouterr().out.splitlines() == sorted(called)


def test_a_name_belongs_to_its_service_and_to_one_place() -> None:
    for path in FILES:
        service = path.relative_to(ROOT).parts[1]
        for name in re.findall(r'\bfailpoint\(\s*"([^"]+)"', path.read_text()):
            assert re.fullmatch(rf"{service}\.[a-z_]+\.[a-z_]+", name)

    names = failpoints.names_in(failpoints._sources())
    assert len(set(names)) == len(names) > 20


def test_cores_and_ports_have_none() -> None:
    services = ROOT / "services"
    pure = [*services.glob("*/src/*/core/**/*.py"), *services.glob("*/src/*/ports.py")]

    assert failpoints.names_in(pure) == []
