"""Fixtures of the tests that start all services."""

from e2e_harness import make_run

__all__ = ["make_run"]
