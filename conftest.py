"""Settings of all tests."""

import os

from hypothesis import HealthCheck, settings

# A busy two-core machine must not turn a slow example into a failure, and unit tests are run often.
# The same examples every time: a change is judged by what it changed. `HUNT=1` draws new ones.
settings.register_profile(
    "treadle",
    deadline=None,
    print_blob=True,
    max_examples=40,
    derandomize=not os.environ.get("HUNT"),
    database=None,
)
# `--hypothesis-profile=long`: what a state machine finds only after many steps.
settings.register_profile(
    "long",
    parent=settings.get_profile("treadle"),
    max_examples=200,
    stateful_step_count=2000,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("treadle")
