"""Fixtures: those of the end-to-end tests."""

from e2e_harness import make_run

__all__ = ["make_run"]
