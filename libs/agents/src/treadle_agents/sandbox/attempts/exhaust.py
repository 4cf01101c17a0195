"""Attempts to use more than there is: disks, processes, memory, output."""

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

from treadle_agents.sandbox.attempts.registry import EVIDENCE, LIBC, MIB, attempt

FOLDERS = ("/tmp", "/dev/shm", "/home/agent")  # noqa: S108, of the box
"""What a box lets its commands write."""


@attempt
def fill_disk() -> str:
    """Writes until there is no room."""
    written = 0
    for folder in FOLDERS:
        with contextlib.suppress(OSError), Path(folder, "filler").open("wb", 0) as file:
            while written <= EVIDENCE["scratch_mb"] * MIB * 2:
                written += file.write(bytes(MIB))
    return f"{written} bytes" if written > EVIDENCE["scratch_mb"] * MIB else ""


@attempt
def many_files() -> str:
    """Makes files until no more can be made."""
    made = 0
    for folder in FOLDERS:
        with contextlib.suppress(OSError):
            while made <= EVIDENCE["files"] * 2:
                Path(folder, f"{made}").touch()
                made += 1
    return f"{made} files" if made > EVIDENCE["files"] else ""


@attempt
def fork_bomb() -> str:
    """Forks in every process that forks."""
    first, deadline = os.getpid(), time.monotonic() + 2
    read, write = os.pipe()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if not os.fork():
                os.write(write, b"x")
    if os.getpid() != first:
        signal.pause()
    os.set_blocking(read, False)
    made = len(os.read(read, MIB))
    return f"{made} processes" if made > EVIDENCE["processes"] else ""


@attempt
def thread_bomb() -> str:
    """Starts threads until no more can be started."""
    stop = threading.Event()
    started = 0
    threading.stack_size(65536)  # so that memory is not what ends it
    with contextlib.suppress(RuntimeError, MemoryError):
        while started <= EVIDENCE["processes"] * 2:
            threading.Thread(target=stop.wait, daemon=True).start()
            started += 1
    stop.set()
    return f"{started} threads" if started > EVIDENCE["processes"] else ""


@attempt
def memory_bomb() -> str:
    """Takes more memory than there may be, in one process."""
    held: list[bytes] = []
    with contextlib.suppress(MemoryError):
        while len(held) <= EVIDENCE["memory_mb"] // 8 * 4:
            held.append(b"\1" * 8 * MIB)
    time.sleep(10)  # for a watch that is late
    return f"{len(held) * 8} MiB"


@attempt
def memory_of_many() -> str:
    """Takes more memory than there may be, in processes that each take little."""
    read, write = os.pipe()
    for _ in range(12):
        if not os.fork():
            held = b"\1" * (EVIDENCE["memory_mb"] * MIB // 4)
            os.write(write, held[:1])
            signal.pause()
    for _ in range(12):
        os.read(read, 1)
    time.sleep(10)  # for a watch that is late
    return f"{EVIDENCE['memory_mb'] * 3} MiB"


@attempt
def memory_without_owner() -> str:
    """Takes memory that belongs to no process: in nameless files, and in segments."""
    with contextlib.suppress(OSError):
        os.close(os.memfd_create("hidden"))
        return "a nameless file in memory"
    return "a segment" if LIBC.shmget(0, MIB, 0o1600) >= 0 else ""


@attempt
def endless_output() -> str:
    """Writes without end."""
    while True:
        os.write(1, b"y" * 65536)
