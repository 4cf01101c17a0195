"""What a machine and an installation must have, each as one finding. Nothing is changed."""

import importlib.metadata as metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory

from packaging.requirements import Requirement

from treadle_runtime.local_servers.known import KINDS

_GIB = 2**30
_SHARED = Path("/dev/shm")  # noqa: S108, where weights on their way lie


class State(StrEnum):
    """How a finding bears on a run."""

    OK = "ok"
    WARNING = "warning"
    """A run starts, and may be slow or end early."""
    PROBLEM = "problem"
    """A run cannot work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    state: State
    text: str
    """What there is, and what to do unless it is enough."""


def python(version: tuple[int, int]) -> Finding:
    """The interpreter."""
    said = f"Python {version[0]}.{version[1]}"
    if (3, 11) <= version < (3, 13):
        return Finding("python", State.OK, said)
    return Finding("python", State.PROBLEM, f"{said}; make the environment with 3.11 or 3.12")


def libraries() -> Finding:
    """What the installed distributions of Treadle need, against what is installed."""
    ours = [each for each in metadata.distributions() if str(each.name).startswith("treadle")]
    lacking = [line for each in ours for line in _lacking(each.name, each.requires or [])]
    if lacking:
        advice = "; ".join(sorted(set(lacking)))
        return Finding("libraries", State.PROBLEM, f"{advice}; install them with pip")
    return Finding("libraries", State.OK, f"{len(ours)} distributions have what they need")


def _lacking(name: str, requirements: list[str], extra: str = "") -> Iterator[str]:
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{name} needs {requirement}, which is not installed"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{name} needs {requirement}, and {version} is installed"
        for chosen in requirement.extras:
            of_extra = metadata.requires(requirement.name) or []
            yield from _lacking(f"{requirement.name}[{chosen}]", of_extra, chosen)


def cores(count: int) -> Finding:
    """Cores that this process may use."""
    if count >= 2:
        return Finding("cores", State.OK, f"{count}")
    text = "1; trainer and engine take turns on it, so expect half the speed"
    return Finding("cores", State.WARNING, text)


def memory(available: int, needed: int) -> Finding:
    """Memory in bytes, against what a run of the policy needs at least."""
    said = f"{available / _GIB:.1f} GiB available"
    if available >= needed:
        return Finding("memory", State.OK, said)
    text = f"{said}, about {needed / _GIB:.1f} needed; take a smaller policy or a larger machine"
    return Finding("memory", State.WARNING, text)


def available_memory() -> int:
    """Bytes that can be had: of the machine, or of the control group where that is less."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    machine = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    group, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if group.is_file() and (limit := group.read_text().strip()).isdigit():
        return min(machine * 1024, int(limit) - int(used.read_text()))
    return machine * 1024


def shared_memory(free: int, needed: int) -> Finding:
    """Room for weights on their way, in bytes."""
    said = f"{free / _GIB:.2f} GiB free in {_SHARED}"
    if free >= needed:
        return Finding("shared_memory", State.OK, said)
    text = (
        f"{said}, {needed / _GIB:.2f} needed; enlarge it (docker run --shm-size), or set "
        "refit.transport, trainer.transport and rollout.transport to {name: files}"
    )
    return Finding("shared_memory", State.PROBLEM, text)


def free_shared_memory() -> int:
    """Bytes that are free there; 0 without it."""
    return shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else 0


def disk(directory: Path) -> Finding:
    """The disk of the nearest folder that is there: room, and whether it can be written to."""
    there = existing(directory)
    free = shutil.disk_usage(there).free
    said = f"{free / _GIB:.1f} GiB free at {directory}"
    if not os.access(there, os.W_OK):
        text = f"nothing can be written in {there}; set run.dir to another folder"
        return Finding("disk", State.PROBLEM, text)
    if free < _GIB:
        return Finding("disk", State.WARNING, f"{said}; make room, or set run.dir to another disk")
    return Finding("disk", State.OK, said)


def sockets() -> Finding:
    """Whether services could listen."""
    try:
        with TemporaryDirectory(prefix="treadle-") as folder, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(f"{folder}/socket")
            unix.listen()
        with socket.socket() as loopback:
            loopback.bind(("127.0.0.1", 0))
    except OSError as error:
        text = f"no socket can be made: {error}; allow unix sockets and loopback in this container"
        return Finding("sockets", State.PROBLEM, text)
    return Finding("sockets", State.OK, "unix sockets and loopback ports can be listened on")


def open_files(soft: int) -> Finding:
    """Files that a process may have open."""
    if soft == resource.RLIM_INFINITY or soft >= 1024:
        return Finding("open_files", State.OK, f"{'no limit' if soft < 0 else soft}")
    return Finding("open_files", State.WARNING, f"{soft}; `ulimit -n 4096` before the run")


def clock(now: float, file_time: float) -> Finding:
    """This host's clock, against that of the file system that keeps the run, in Unix seconds."""
    if now < 1.7e9:
        return Finding("clock", State.PROBLEM, f"says {time.ctime(now)}; set it")
    if abs(now - file_time) > 2:
        text = f"{now - file_time:+.1f} s from that of the file system; let NTP set both"
        return Finding("clock", State.WARNING, text)
    return Finding("clock", State.OK, "agrees with that of the file system")


def existing(directory: Path) -> Path:
    """The directory, or the nearest above it that is there."""
    return next(each for each in (directory, *directory.resolve().parents) if each.is_dir())


def written_at(directory: Path) -> float:
    """The time that the file system gives a file which is written now."""
    there = existing(directory)
    place = there if os.access(there, os.W_OK) else None
    with NamedTemporaryFile(dir=place) as file:
        file.write(b"\0")
        file.flush()
        return os.fstat(file.fileno()).st_mtime


def local_servers() -> Finding:
    """Which servers a run could start for itself: no recipe needs one unless it says so."""
    there = {
        name: kind(Path.cwd(), {"port": 0}).binary() is not None for name, kind in KINDS.items()
    }
    said = ", ".join(
        f"{name}{'' if found else ' (not installed)'}" for name, found in there.items()
    )
    return Finding("servers", State.OK, f"that a run may start for itself: {said}")


def gpu() -> Finding:
    """Whether there is a GPU, and whether torch can use it: asked in a process of its own."""
    if not Path("/proc/driver/nvidia/version").is_file() and shutil.which("nvidia-smi") is None:
        return Finding("gpu", State.OK, "none; everything runs on the CPU")
    code = "import torch as t; print(t.__version__, t.cuda.get_device_name())"
    try:
        done = subprocess.run(  # noqa: S603, our own interpreter
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("gpu", State.WARNING, "torch said nothing for 120 s; look at `nvidia-smi`")
    if done.returncode == 0:
        return Finding("gpu", State.OK, f"torch {done.stdout.strip()}")
    last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    text = f"there is one that torch cannot use ({last}); install a build of torch for its driver"
    return Finding("gpu", State.WARNING, text)
