"""What every Engine keeps, as checks that an engine's author runs against it.

Each check is a coroutine that takes a Subject and raises ConformanceError on a broken promise;
`CHECKS` lists them and `run` gives each its deadline. `python -m treadle_rollout.conformance NAME`
runs all on an engine of this package. What must overlap is held open until it did.
"""

from treadle_rollout.conformance.checks import CHECKS
from treadle_rollout.conformance.subject import (
    Check,
    ConformanceError,
    NotApplicableError,
    Subject,
    run,
)

__all__ = ["CHECKS", "Check", "ConformanceError", "NotApplicableError", "Subject", "run"]
