"""Fixtures: those of the end-to-end tests, and a disk whose power can be cut."""

import contextlib

import pytest
from e2e_harness import make_run
from power import powered

__all__ = ["make_powered", "make_run"]


@pytest.fixture
def make_powered(tmp_path):
    """The disk at `disk`, of an image; one at a time. Skips where mounting is not permitted."""
    path = tmp_path / "disk"
    path.mkdir()

    @contextlib.contextmanager
    def make(image):
        with powered(path, image) as disk:
            if disk is None:
                pytest.skip("no power can be cut: mounting a loop device is not permitted here")
            yield disk

    return make
