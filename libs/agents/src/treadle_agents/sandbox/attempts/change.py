"""Attempts to change what is outside: files, processes, users, the kernel."""

import contextlib
import ctypes
import errno
import os
import signal
import sys
import time
from pathlib import Path

from treadle_agents.sandbox.attempts.reach import reads
from treadle_agents.sandbox.attempts.registry import EVIDENCE, LIBC, attempt, first


@attempt
def write_outside() -> str:
    """Writes where nothing is to be written."""
    prefix = sys.base_prefix
    folders = [
        "/",
        "/usr",
        "/usr/bin",
        "/etc",
        "/run",
        "/run/box",
        "/dev",
        "/proc",
        "/home",
        prefix,
    ]
    folders += [f"{prefix}/lib", "/root", "/var/tmp", "/sys", EVIDENCE["folder"]]  # noqa: S108
    return first(map(_writes, folders))


@attempt
def overwrite_host_program() -> str:
    """Opens programs and the host's files to change them."""
    files = [
        "/bin/sh",
        "/usr/bin/env",
        os.path.realpath(sys.executable),
        "/etc/passwd",
        "/etc/ld.so.cache",
    ]
    return first(map(_opens, [*files, EVIDENCE["file"]]))


@attempt
def survivor() -> str:
    """Leaves a process that is in a session of its own, and nobody's child."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            os.closerange(0, 1024)
            Path("started").touch()
            lives = "import signal; signal.pause()"
            command = [sys.executable, "-c", lives, EVIDENCE["survivor"]]
            os.execv(sys.executable, command)  # noqa: S606, no shell is meant
        os._exit(0)
    while not Path("started").exists():
        time.sleep(0.01)
    return ""


@attempt
def signal_host() -> str:
    """Kills by number: a process of the host, its own parents, and everybody that it may."""
    for pid in (EVIDENCE["pid"], 1, os.getppid()):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGTERM)
    return ""


@attempt
def trace_parent() -> str:
    """Attaches to other processes, and opens their memory."""
    for pid in (os.getppid(), 1, EVIDENCE["pid"]):
        if LIBC.ptrace(16, pid, 0, 0) == 0:  # PTRACE_ATTACH
            return f"attached to {pid}"
    with contextlib.suppress(OSError):
        Path(f"/proc/{EVIDENCE['pid']}/mem").open("rb").close()
        return "opened memory"
    return ""


@attempt
def mount() -> str:
    """Mounts, or makes writable what is mounted."""
    flags = 32 | 4096  # MS_REMOUNT, MS_BIND
    for source, target, kind, how in (
        (b"tmpfs", b"/tmp", b"tmpfs", 0),
        (b"proc", b"/proc", b"proc", 0),
        (b"/", b"/tmp", b"", 4096),
        (b"none", b"/usr", b"", flags),
        (b"none", b"/", b"", flags),
    ):
        if LIBC.mount(source, target, kind, how, b"") == 0:
            return f"mounted {target.decode()}"
    return "unmounted" if LIBC.umount2(b"/tmp", 2) == 0 else ""


@attempt
def new_namespace() -> str:
    """Makes a namespace in which it would be root."""
    for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000):  # user, mount, pid, net
        if LIBC.unshare(flag) == 0:
            return f"namespace {flag:#x}"
    child = LIBC.syscall(56, 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)  # clone, on x86-64
    if child == 0:
        os._exit(0)
    return "a child in one" if child > 0 and os.uname().machine == "x86_64" else ""


@attempt
def become_root() -> str:
    """Becomes root, by itself or by a program that would make it so."""
    for change in (os.setuid, os.setgid):
        with contextlib.suppress(OSError):
            change(0)
            return change.__name__
    status = Path("/proc/self/status").read_text()
    for wanted in ("NoNewPrivs:\t1", "CapEff:\t0000000000000000", "CapBnd:\t0000000000000000"):
        if wanted not in status:
            return f"not {wanted}"
    for file in ("/usr/bin/su", "/usr/bin/passwd", sys.executable):
        if Path(file).exists() and not os.statvfs(file).f_flag & os.ST_NOSUID:
            return f"{file} may change its user"
    return ""


@attempt
def devices() -> str:
    """Opens devices, and makes one."""
    places = [
        "/dev/mem",
        "/dev/kmsg",
        "/dev/kvm",
        "/dev/fuse",
        "/dev/sda",
        "/dev/vda",
        "/dev/nvidia0",
    ]
    for place in places:
        with contextlib.suppress(OSError):
            os.close(os.open(place, os.O_RDONLY))
            return place
    with contextlib.suppress(OSError):
        os.mknod("/tmp/disk", 0o60600, os.makedev(254, 0))  # noqa: S108
        return "made a device"
    return ""


@attempt
def kernel_settings() -> str:
    """Changes the kernel by its files."""
    proc = ("sysrq-trigger", "sys/kernel/core_pattern", "sys/kernel/hostname", "sys/vm/drop_caches")
    found = first(_opens(f"/proc/{name}") for name in proc)
    return found or ("/sys" if Path("/sys/kernel").is_dir() else "") or reads(["/proc/kcore"])


@attempt
def denied_calls() -> str:
    """Makes system calls that reach deep into the kernel."""
    calls = {"x86_64": (321, 298, 323, 425, 250, 304), "aarch64": (280, 241, 282, 425, 219, 265)}
    for call in calls[os.uname().machine]:
        if LIBC.syscall(call, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() != errno.EPERM:
            return f"call {call}"
    return ""


@attempt
def links() -> str:
    """Lays links where files are fetched from, and put."""
    work = Path("/home/agent")
    for name, target in {
        "result": EVIDENCE["file"],
        "folder": EVIDENCE["folder"],
        "up": "/",
    }.items():
        (work / name).symlink_to(target)
    os.mkfifo(work / "pipe")
    return ""


@attempt
def terminal() -> str:
    """Types into the terminal of whoever started it."""
    with contextlib.suppress(OSError):
        os.close(os.open("/dev/tty", os.O_RDWR))
        return "the terminal"
    return ""


def _writes(folder: str) -> str:
    with contextlib.suppress(OSError):
        Path(folder, "treadle-probe").touch()
        return f"wrote into {folder}"
    return ""


def _opens(file: str) -> str:
    with contextlib.suppress(OSError):
        os.close(os.open(file, os.O_WRONLY))
        return f"opened {file}"
    return ""
