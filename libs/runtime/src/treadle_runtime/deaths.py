"""Why a child process ended, in one record."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

_LINE = 200
"""Characters of the last log line that are kept."""


@dataclass(frozen=True, slots=True)
class Death:
    """One end of one child that was not done."""

    service: str
    pid: int
    code: int
    """Exit status, negative for a signal."""
    lived_s: float
    peak_rss_mb: float
    """Most memory that it ever held, in MiB; the supervisor's own counts as a start."""
    memory_kill: str
    """`yes`: its control group killed for memory meanwhile; `no`; `unknown`: SIGKILL by somebody
    else, and no counter to read."""
    hung: bool
    """The supervisor killed it, because it no longer answered."""
    last_rpc: str
    """`served METHOD` or `called METHOD`; empty when there was none."""
    last_rpc_ago_s: float
    last_line: str
    """Of its log."""
    restarts: int
    """How often this service was started again before."""

    @property
    def how(self) -> str:
        """`signal SIGKILL`, `signal SIGKILL because it hung` or `status 1`."""
        if self.hung:
            return "signal SIGKILL because it hung"
        if self.code < 0:
            return f"signal {signal.Signals(-self.code).name}"
        return f"status {self.code}"

    def row(self) -> dict[str, float | int | str]:
        """For a tracker."""
        return {
            "service": self.service,
            "pid": self.pid,
            "signal": signal.Signals(-self.code).name if self.code < 0 else "",
            "status": max(self.code, -1),
            "lived_s": round(self.lived_s, 3),
            "peak_rss_mb": round(self.peak_rss_mb, 1),
            "memory_kill": self.memory_kill,
            "hung": int(self.hung),
            "last_rpc": self.last_rpc,
            "last_rpc_ago_s": round(self.last_rpc_ago_s, 3),
            "last_line": self.last_line,
            "restarts": self.restarts,
        }

    def __str__(self) -> str:
        rpc = f"{self.last_rpc} {self.last_rpc_ago_s:.1f} s before" if self.last_rpc else "none"
        return (
            f"{self.service} ended with {self.how} after {self.lived_s:.1f} s: pid {self.pid}, "
            f"peak memory {self.peak_rss_mb:.0f} MiB, killed for memory: {self.memory_kill}, "
            f"last RPC: {rpc}, restarts so far: {self.restarts}, last line: {self.last_line}"
        )


def memory_kill(code: int, *, sent_by_us: bool, before: int | None, now: int | None) -> str:
    """Judges a death by the counter of memory kills at its start and end (None: not readable)."""
    if code != -signal.SIGKILL or sent_by_us:
        return "no"
    if before is None or now is None:
        return "unknown"
    return "yes" if now > before else "no"


def memory_kills() -> int | None:
    """How many processes of our control group were killed for memory; None where nobody says."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        root = Path("/sys/fs/cgroup")
        if not controllers:
            found = _counter(root / path.lstrip("/") / "memory.events", root / "memory.events")
        elif "memory" in controllers.split(","):
            below = root / "memory"
            name = "memory.oom_control"
            found = _counter(below / path.lstrip("/") / name, below / name)
        else:
            continue
        if found is not None:
            return found
    return None


def _counter(*files: Path) -> int | None:
    """`oom_kill N` in the first file that is there; a container sees its own group as the root."""
    for file in files:
        try:
            words = file.read_text(encoding="utf-8").split()
        except OSError:
            continue
        if "oom_kill" in words:
            return int(words[words.index("oom_kill") + 1])
    return None


def last_line(log: Path) -> str:
    """The last line that says something, shortened."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 4 * _LINE))
        lines = file.read().decode(errors="replace").splitlines()
    return next((line.strip()[:_LINE] for line in reversed(lines) if line.strip()), "")
