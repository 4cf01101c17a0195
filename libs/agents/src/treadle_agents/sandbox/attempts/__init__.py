"""Attempts to escape from a box, made from inside by a program of the standard library alone.

    python -m treadle_agents.sandbox.attempts NAME < EVIDENCE

EVIDENCE is a JSON object that says what there would be to find. Prints `escaped` and how, or
`held`. Whatever else is printed, or nothing, is no proof of anything.
"""

from treadle_agents.sandbox.attempts import change, exhaust, reach
from treadle_agents.sandbox.attempts.registry import ATTEMPTS, EVIDENCE

__all__ = ["ATTEMPTS", "EVIDENCE", "change", "exhaust", "reach"]
