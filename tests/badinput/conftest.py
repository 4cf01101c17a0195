"""Fixtures of the tests of bad input."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location(
    "badinput_harness", Path(__file__).parent / "harness.py"
)
assert _spec is not None
assert _spec.loader is not None
harness = importlib.util.module_from_spec(_spec)
sys.modules["badinput_harness"] = harness
_spec.loader.exec_module(harness)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes small disks, at `disk` unless told otherwise; skips where mounting is not permitted."""
    with contextlib.ExitStack() as stack:

        def make(size: str, path: Path = tmp_path / "disk") -> Any:
            path.mkdir(exist_ok=True)
            disk = stack.enter_context(harness.mounted(size, path))
            if disk is None:
                pytest.skip("a file system of its own is not permitted")
            return disk

        yield make


@pytest.fixture(scope="module")
def world(tmp_path_factory: Any) -> Iterator[Any]:
    """A run in progress on the real service, which has to drain well at the end."""
    directory = tmp_path_factory.mktemp("run")
    settings = harness.experience_settings(directory, directory)
    service = harness.Service("experience", directory, settings)
    with harness.serving(service) as peer:
        harness.begin(peer)
        yield harness.World(service, peer)
        status, said = service.stop()
        assert status == 0
        assert "Traceback" not in said
        harness.sums(directory)
