"""The last RPC that a process began, where its supervisor can still read it after a kill.

The supervisor opens a small file in memory, gives its descriptor to the child, and reads it when
the child is dead; so a note costs one write of a few bytes, and nothing is left behind.
"""

import os
import time
from collections.abc import Mapping

DESCRIPTOR = "TREADLE_LAST_CALL_FD"
"""Environment variable: where to write; nothing is noted without it."""

_SIZE = 120
"""Bytes of a note, padded, so that one write replaces the note before."""

_descriptor = -1


def begin(environment: Mapping[str, str]) -> None:
    """Notes from here on, where the supervisor wants it."""
    global _descriptor  # noqa: PLW0603, a process has one note
    _descriptor = int(environment.get(DESCRIPTOR, "-1"))


def note(what: str) -> None:
    """Notes that a call begins: `served METHOD` or `called METHOD`."""
    if _descriptor >= 0:
        line = f"{time.monotonic():.3f} {what}".encode()[:_SIZE]
        os.pwrite(_descriptor, line.ljust(_SIZE), 0)


def opened() -> int:
    """A descriptor for one child's notes."""
    return os.memfd_create("last-call")


def read(descriptor: int) -> tuple[str, float]:
    """The last note and the seconds since; ("", 0.0) where there is none."""
    moment, _, what = os.pread(descriptor, _SIZE, 0).decode(errors="replace").partition(" ")
    if not what:
        return "", 0.0
    return what.strip(), max(0.0, time.monotonic() - float(moment))
