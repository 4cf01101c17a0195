"""Who writes to a ledger: a process, and whether it is known to be dead."""

import functools
from pathlib import Path

_ENDED = ("Z", "X")
"""States of a process that nobody has waited for."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_process() -> str:
    """This process as others see it: no other, at any time, has the same words."""
    return f"{_place()}/{_life('self')}"


def is_dead(holder: str) -> bool:
    """Whether the process ran where this one could see it, and does not any more."""
    place, _, life = holder.rpartition("/")
    return place == _place() and _life(life.partition("-")[0]) != life


@functools.cache
def _place() -> str:
    """The boot of this host and the space of its process ids, which differs by container."""
    boot = _BOOT_ID.read_text(encoding="ascii").strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


def _life(pid: str) -> str:
    """`pid-ticks`: a process by its id and its start since boot; empty where it does not run."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    number, _, rest = stat.partition(" (")
    fields = rest.rpartition(")")[2].split()
    return "" if fields[0] in _ENDED else f"{number}-{fields[19]}"
