"""Attempts to reach what is not to be reached: networks, files, processes, secrets."""

import contextlib
import errno
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from treadle_agents.sandbox.attempts.registry import EVIDENCE, attempt, first


@attempt
def network_host() -> str:
    """Connects to a server on the host's loopback."""
    return _connects(socket.AF_INET, ("127.0.0.1", EVIDENCE["port"]))


@attempt
def network_metadata() -> str:
    """Connects to where clouds keep the credentials of a machine."""
    return _connects(socket.AF_INET, ("169.254.169.254", 80), routed=True)


@attempt
def network_datagram() -> str:
    """Sends a datagram out, as a lookup of a name would."""
    return _connects(socket.AF_INET, ("192.0.2.1", 53), kind=socket.SOCK_DGRAM)


@attempt
def socket_of_host() -> str:
    """Connects to a socket in the host's file system."""
    places = [
        EVIDENCE["socket"],
        "/run/docker.sock",
        "/var/run/docker.sock",
        "/run/dbus/system_bus_socket",
    ]
    return first(_connects(socket.AF_UNIX, place) for place in places)


@attempt
def socket_without_file() -> str:
    """Connects to a socket of the host that has a name and no file."""
    return _connects(socket.AF_UNIX, "\0" + EVIDENCE["abstract"])


@attempt
def read_passwords() -> str:
    """Reads the host's password hashes."""
    return reads(
        ["/etc/shadow", "/etc/gshadow", "/proc/1/root/etc/shadow", "/proc/self/root/etc/shadow"]
    )


@attempt
def read_host_file() -> str:
    """Reads a file that everybody on the host may read, by all the ways that lead there."""
    file = EVIDENCE["file"]
    roots = ["", "/proc/1/root", "/proc/self/root", "/proc/1/cwd/../../..", "/../.."]
    return reads([root + file for root in roots])


@attempt
def read_home_of_root() -> str:
    """Reads what root keeps."""
    names = (".ssh", ".bash_history", ".netrc", ".aws", ".kube", ".docker", ".profile")
    return reads([f"/root/{name}" for name in names])


@attempt
def processes_of_host() -> str:
    """Looks for a process of the host."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and EVIDENCE["marker"] in (entry / "cmdline").read_text():
                return f"process {entry.name}"
    return ""


@attempt
def secret_in_environment() -> str:
    """Looks for a secret in the environment of every process that it sees."""
    texts = [json.dumps(dict(os.environ))]
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            texts.append(file.read_text(errors="replace"))
    return "the secret" if any(EVIDENCE["secret"] in text for text in texts) else ""


@attempt
def file_of_another_box() -> str:
    """Looks everywhere for a file that another box holds."""
    for folder, folders, files in os.walk("/"):
        if folder == "/":
            folders[:] = {*folders} - {"proc", "usr"}
        if folder == sys.base_prefix:
            folders.clear()
        if EVIDENCE["other"] in files:
            return folder
    return ""


@attempt
def open_descriptors() -> str:
    """Looks for files and sockets that somebody left open."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            place = str(entry.readlink())
            if int(entry.name) > 2 and place != f"/proc/{os.getpid()}/fd":
                return place
    return ""


def _connects(
    family: int, place: Any, *, kind: int = socket.SOCK_STREAM, routed: bool = False
) -> str:
    """Whether something can be reached; `routed`: whether a way there is known at all."""
    with socket.socket(family, kind) as client:
        client.settimeout(2)
        try:
            client.connect(place)
        except TimeoutError:
            return f"a way to {place}" if routed else ""
        except OSError as error:
            known = error.errno in (errno.ECONNREFUSED, errno.ECONNRESET)
            return f"a way to {place}" if routed and known else ""
        return f"connected to {place}"


def reads(places: list[str]) -> str:
    """Reads from the first of `places` that lets itself be read."""
    for place in places:
        with contextlib.suppress(OSError):
            if Path(place).is_dir():
                return f"read {[*Path(place).iterdir()]}"
            with Path(place).open("rb") as file:
                return f"read {file.read(8)}"
    return ""
