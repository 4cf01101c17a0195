"""Whose a container or a Job is, so that what outlived its owner is removed, and nothing else.

What a worker starts elsewhere is not among its processes, and goes on when it is killed.
"""

import hashlib
import os
import re
import socket
import time
from collections.abc import Mapping
from pathlib import Path

RUN, SESSION, OWNER, UNTIL = "treadle.run", "treadle.session", "treadle.owner", "treadle.until"
"""Labels of what we start; the last is a time, in seconds since 1970."""
_GRACE_S = 60.0
"""After its deadline, in which its owner removes it."""
_UNFIT = re.compile(r"[^A-Za-z0-9]+")


def labels(session: str, deadline_s: float) -> dict[str, str]:
    """Labels of what this process starts now, fit for an engine and for Kubernetes."""
    return {
        RUN: _fit(os.environ.get("TREADLE_RUN", "")),
        SESSION: _fit(session),
        OWNER: owner(),
        UNTIL: str(int(time.time() + deadline_s + _GRACE_S)),
    }


def owner() -> str:
    """This process: where it can be seen, its id and when it started."""
    return f"{_here()}.{os.getpid()}.{_started(os.getpid())}"


def is_left_over(found: Mapping[str, str]) -> bool:
    """Whether what has these labels outlived its owner, or its deadline."""
    until = found.get(UNTIL, "")
    if until.isdigit() and int(until) < time.time():
        return True
    here, _, rest = found.get(OWNER, "").partition(".")
    pid, _, started = rest.partition(".")
    return here == _here() and pid.isdigit() and _started(int(pid)) != started


def _here() -> str:
    """Names this host and this view of its processes."""
    view = Path("/proc/self/ns/pid").stat().st_ino
    return hashlib.sha256(f"{socket.gethostname()}/{view}".encode()).hexdigest()[:12]


def _started(pid: int) -> str:
    """When a process started, in ticks since the host did; empty where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def _fit(text: str) -> str:
    return _UNFIT.sub("-", text)[:60].strip("-")
