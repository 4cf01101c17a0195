"""What every Engine keeps, as checks that an engine's author runs against it.

Each check is a coroutine that takes a Subject and raises ConformanceError on a broken promise;
`CHECKS` lists them and `run` gives each its deadline. What must overlap is held open until it did.
"""

from treadle_rollout.conformance.checks import CHECKS
from treadle_rollout.conformance.subject import Check, ConformanceError, Subject, run

__all__ = ["CHECKS", "Check", "ConformanceError", "Subject", "run"]
