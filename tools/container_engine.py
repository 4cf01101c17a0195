"""A container engine: the machine's own where there is one, else Debian's dockerd, private to us.

The private one needs root, `dockerd` on PATH (package docker.io) and nothing else. It listens on a
unix socket, keeps its images in `/var/lib`, and is ended by its process id.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException

ROOM = Path("/run/treadle-dockerd")
IMAGES = Path("/var/lib/treadle-dockerd")
"""Where the private engine keeps images, which are worth keeping between two of its lives."""
MACHINE = "unix:///var/run/docker.sock"
PRIVATE = f"unix://{ROOM}/docker.sock"
TESTCONTAINERS = {
    "TESTCONTAINERS_RYUK_DISABLED": "true",  # it is an image of its own, which nobody has here
    "TESTCONTAINERS_CONNECTION_MODE": "docker_host",
    "TESTCONTAINERS_HOST_OVERRIDE": "127.0.0.1",
}
_PID = ROOM / "pid"
_START_S = 30.0
_STOP_S = 30.0
_LOOK_S = 0.1
_started: dict[int, "subprocess.Popen[bytes]"] = {}
"""Engines of this process by process id, which only their parent can see off."""


class NoEngineError(RuntimeError):
    """No engine answers and none can be started; the message says what would help."""


@contextlib.contextmanager
def running() -> Generator[Any]:
    """A Docker client. Meanwhile this process' environment leads other clients to the same engine.

    An engine that had to be started is ended after it.

    Raises:
        NoEngineError: where there is none and none can be started.
    """
    found = find()
    environment = start() if found is None else found
    told = {**TESTCONTAINERS, **environment}
    added = {name: value for name, value in told.items() if name not in os.environ}
    os.environ.update(added)
    try:
        with contextlib.closing(client(environment)) as asked:
            yield asked
    finally:
        for name in added:
            del os.environ[name]
        if found is None:
            stop()


def find() -> dict[str, str] | None:
    """The environment in which clients reach an engine that is there; None where none is."""
    named = os.environ.get("DOCKER_HOST")
    if named is not None and named != PRIVATE:
        if not _answers(named):
            raise NoEngineError(f"DOCKER_HOST is {named}, where no engine answers")
        return {}
    if named is None and _answers(MACHINE):
        return {}
    return _private() if _answers(PRIVATE) else None


def start() -> dict[str, str]:
    """Starts the private engine; returns the environment in which clients reach it.

    Raises:
        NoEngineError: where it cannot be started.
    """
    if shutil.which("dockerd") is None or os.geteuid() != 0:
        raise NoEngineError(
            "no container engine: set DOCKER_HOST, or run this as root where `dockerd` is on PATH "
            "(Debian: apt-get install --no-install-recommends docker.io)"
        )
    ROOM.mkdir(parents=True, exist_ok=True)
    command = ["dockerd", "--data-root", str(IMAGES), "--exec-root", str(ROOM / "exec")]
    command += ["--pidfile", str(_PID), "--host", PRIVATE, "--storage-driver", "overlay2"]
    with (ROOM / "log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603, our own words
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # a Ctrl-C must leave it to remove what we started
        )
    give_up = time.monotonic() + _START_S
    while not _answers(PRIVATE):
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            tail = (ROOM / "log").read_text(encoding="utf-8", errors="replace")[-1500:]
            raise NoEngineError(f"dockerd did not start within {_START_S:.0f} s:\n{tail}")
        time.sleep(_LOOK_S)
    _started[process.pid] = process
    return _private()


def stop() -> bool:
    """Ends the private engine; False where none runs. Its images stay."""
    pid = _running()
    if pid is None:
        return False
    os.kill(pid, signal.SIGTERM)
    give_up = time.monotonic() + _STOP_S
    while _running() == pid:
        if time.monotonic() > give_up:
            os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    if pid in _started:
        _started.pop(pid).wait()
    return True


def client(environment: dict[str, str]) -> Any:
    """A Docker client for what `find` or `start` returned."""
    return docker.from_env(environment={**os.environ, **environment}, timeout=120)


def _private() -> dict[str, str]:
    return {"DOCKER_HOST": PRIVATE, **TESTCONTAINERS}


def _running() -> int | None:
    """The private engine's process, if it is one still."""
    try:
        pid = int(_PID.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError):
        return None
    return pid if PRIVATE.encode() in words and state != "Z" else None


def _answers(address: str) -> bool:
    if address.startswith("unix://") and not Path(address.removeprefix("unix://")).exists():
        return False
    try:
        asked: Any = docker.DockerClient(base_url=address, timeout=5)
        asked.ping()
        asked.close()
    except DockerException:
        return False
    return True
