"""A disk whose power can be cut: of what was written, what was fsynced is there afterwards.

It is a file system of its own (ext4 on a loop device) that is told to write nothing by itself. A
cut kills every process on it at once, and takes the image as it is then: what the kernel still had
in memory is gone, as when the power fails. Needs root.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from badinput_harness import ROOT, Disk

_SIZE = 64 << 20
_OPTIONS = "loop,noatime,commit=600"
"""What is not fsynced stays in memory for half a minute; no test takes that long to its cut."""


@dataclass
class PowerDisk(Disk):
    """A disk, and its image."""

    image: Path

    @property
    def inside(self) -> tuple[str, ...]:
        """Each command is the first of its own tree of processes, all of which die with it."""
        return (*super().inside, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

    def cut(self, process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> Path:
        """The power fails, on `process`, which runs `inside`, and on the disk; the image of it."""
        process.kill()
        process.communicate()
        left = self.image.with_suffix(".cut")
        shutil.copyfile(self.image, left)
        return left


@contextlib.contextmanager
def powered(path: Path, image: Path) -> "Generator[PowerDisk | None]":
    """The file system of `image`, a new one where it is none, at `path`; None without the right."""
    if not image.exists():
        with image.open("wb") as file:
            file.truncate(_SIZE)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)  # noqa: S607
    script = f"mount -o {_OPTIONS} {image} {path} && echo ready && exec sleep 600"
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        try:
            ready = holder.stdout is not None and holder.stdout.readline() == "ready\n"
            yield PowerDisk(path, holder.pid, image) if ready else None
        finally:
            holder.kill()
