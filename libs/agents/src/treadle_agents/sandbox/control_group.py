"""Limits of a whole box as the kernel counts them: a control group of version 2.

Limits of single processes and a watch over their sum hold everywhere; a group also counts what
belongs to no process, as buffers of pipes do, and leaves no time between two looks.
"""

import asyncio
import os
import secrets
from pathlib import Path

from treadle_agents.sandbox.ports import Limits, SandboxMissingError

ROOT = Path("/sys/fs/cgroup")
_WALLS = 5
"""Processes of a box that are no command's: both walls and the keeper."""
_WALLS_MB = 64
"""What these may take, MiB."""
_NEEDED = {"memory", "pids"}
MIB = 1024 * 1024


class ControlGroup:
    """The group of one box."""

    def __init__(self, above: Path, limits: Limits) -> None:
        """Makes a group below `above`; raises SandboxMissingError where that is not ours."""
        self.folder = above / f"box-{secrets.token_hex(8)}"
        memory = (limits.memory_mb + limits.scratch_mb + _WALLS_MB) * MIB
        try:
            self.folder.mkdir()
            (self.folder / "pids.max").write_text(str(limits.processes + _WALLS))
            (self.folder / "memory.max").write_text(str(memory))
            swap = self.folder / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
        except OSError as error:
            why = f"no control group below {above}: {error.strerror}"
            raise SandboxMissingError(why, field="sandbox.control_group", value=above) from error

    def entered(self, command: list[str]) -> list[str]:
        """`command`, as it is started in the group: with all that it will start."""
        procs = str(self.folder / "cgroup.procs")
        return ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', procs, *command]

    def memory_kills(self) -> int:
        """How many processes the kernel has killed for the group's memory."""
        for line in (self.folder / "memory.events").read_text().splitlines():
            name, value = line.split()
            if name == "oom_kill":
                return int(value)
        return 0

    async def close(self) -> None:
        """Kills what is left of the group, and removes it."""
        (self.folder / "cgroup.kill").write_text("1")
        events = self.folder / "cgroup.events"
        while "populated 1" in events.read_text():  # noqa: ASYNC110, of the kernel
            await asyncio.sleep(0.005)
        self.folder.rmdir()


def delegated() -> Path | None:
    """This process's own group, if groups with limits may be made below it."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = [line[3:] for line in lines if line.startswith("0::")]
        folder = ROOT / own[0].lstrip("/")
        given = set((folder / "cgroup.subtree_control").read_text().split())
    except (OSError, LookupError):
        return None
    return folder if given >= _NEEDED and os.access(folder, os.W_OK) else None
