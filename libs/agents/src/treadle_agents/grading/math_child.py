"""Compares mathematical answers for the grader `math_verify`, in a process that may be killed.

One JSON object a line comes in, `right`, `said` and the seconds of processor time that both may
take; out go the word `read` when what is right was understood, and then the reward, or a line
`wrong` and why what is right cannot be compared with.
"""

import json
import resource
import sys
import time
from functools import lru_cache
from importlib import import_module
from typing import Any

MATH: Any = import_module("math_verify")
MEMORY = 2 * 1024**3
"""Bytes that a comparison may take."""


@lru_cache(maxsize=1024)
def understood(right: str) -> Any:
    """What is right, as the library reads it."""
    # Its own limits on time are alarms, which would not end what runs inside the interpreter.
    return MATH.parse(right, parsing_timeout=None) or MATH.parse(f"${right}$", parsing_timeout=None)


def say(line: str) -> None:
    """One line of the answer."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Answers line by line."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    say("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        until = int(time.process_time() + asked["seconds"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (until, most))
        right = understood(asked["right"])
        if not right:
            say("wrong")
            continue
        say("read")
        try:
            said = MATH.parse(asked["said"], parsing_timeout=None)
            alike = MATH.verify(right, said, timeout_seconds=None)
        except (MemoryError, RecursionError):
            alike = False
        say(str(float(alike)))


if __name__ == "__main__":
    main()
