"""Fixtures of the tests that start all services."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("e2e_harness", Path(__file__).parent / "harness.py")
assert _spec is not None
assert _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
sys.modules["e2e_harness"] = harness
_spec.loader.exec_module(harness)


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[object]:
    """Makes runs whose processes are gone when the test is."""
    runs = []

    def make(*overrides: str, small: bool = True) -> object:
        first = harness.SMALL if small else ()
        run = harness.Run(tmp_path / f"run{len(runs)}", *first, *overrides)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.kill_all()
