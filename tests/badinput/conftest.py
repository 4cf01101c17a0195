"""Fixtures of the tests of bad input."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from badinput_harness import Service, World, begin, experience_settings, mounted, serving, sums


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Makes small disks, at `disk` unless told otherwise; skips where mounting is not permitted."""
    with contextlib.ExitStack() as stack:

        def make(size: str, path: Path = tmp_path / "disk") -> Any:
            path.mkdir(exist_ok=True)
            disk = stack.enter_context(mounted(size, path))
            if disk is None:
                pytest.skip("a file system of its own is not permitted")
            return disk

        yield make


@pytest.fixture(scope="module")
def world(tmp_path_factory: Any) -> Iterator[Any]:
    """A run in progress on the real service, which has to drain well at the end."""
    directory = tmp_path_factory.mktemp("run")
    settings = experience_settings(directory, directory)
    service = Service("experience", directory, settings)
    with serving(service) as peer:
        begin(peer)
        yield World(service, peer)
        status, said = service.stop()
        assert status == 0
        assert "Traceback" not in said
        sums(directory)
