"""Settings of all tests."""

from hypothesis import settings

# A busy two-core machine must not turn a slow example into a failure.
settings.register_profile("treadle", deadline=None, print_blob=True)
settings.load_profile("treadle")
