"""A short run as processes of this machine, for the nemesis: its links, its disk, its members."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path

from links import BELL, ENDS, LEDGER, Link, Links, ProxyProcess
from nemesis import DEADLY, Fault, Means
from small_run import RECIPE, ROOT, TREADLE, RunFailedError, SmallRun, account, state_of

from treadle_cli.compose import read_recipe
from treadle_runtime import probe, sockets
from treadle_runtime.config import read_yaml
from treadle_runtime.local_servers.known import KINDS
from treadle_runtime.local_servers.nats import NatsServer
from treadle_runtime.local_servers.server import free_port
from treadle_runtime.measures import Measure

LINKED = Path(__file__).parent / "linked.py"
_ENDLESS = 100_000
_LAST_STEPS = 8
"""Steps after the last fault: more than the run has tasks open for."""
_FIRST_S, _END_S = 120.0, 300.0
_PATIENCE_S = 60.0
_RECOVERED_S = 60.0
"""Longest wait for a recovery; what takes longer is none."""
_LOOK_S = 0.1
_GONE = ("Z", "X", None)
_DISK_SIZE = "192m"
_STATE = {"nats": "servers/nats/jetstream"}
"""Who may lose what it keeps, with its death, and where that lies in the run."""


class Disk:
    """A file system for a run directory, in the mount namespace of this process.

    What tells of the run, its metrics and logs, lies beside it and is never without room.
    """

    def __init__(self, path: Path) -> None:
        """Mounts it."""
        self._balloon = path / "balloon"
        path.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_SIZE}", "tmpfs", str(path)]
        subprocess.run(mount, check=True)  # noqa: S603
        for name in ("metrics", "logs"):
            beside = path.with_name(f"{path.name}-{name}")
            beside.mkdir()
            (path / name).symlink_to(beside)

    def fill(self) -> None:
        """Leaves no room."""
        for size in (1 << 20, 512):
            with contextlib.suppress(OSError), self._balloon.open("ab", 0) as file:
                while file.write(b"\0" * size):
                    pass

    def make_room(self) -> None:
        """Gives it back."""
        self._balloon.unlink(missing_ok=True)

    def unmount(self) -> None:
        """Nothing of it is left."""
        subprocess.run(["umount", "--lazy", str(self._balloon.parent)], check=True)  # noqa: S603, S607


class ProcessStack:
    """A `treadle train`, whose supervisor starts again who dies."""

    def __init__(self, run: SmallRun, links: Links, means: Means, disk: Disk | None) -> None:
        """The run is not started yet; its links are carried."""
        self._run = run
        self._links = links
        self.means = means
        self._disk = disk

    def begin(self) -> list[str]:
        self._run.start(f"experience.steps={_ENDLESS}")
        self._must("the first step", lambda: self._run.step() >= 1, _FIRST_S)
        return self._run.victims()

    def step(self) -> int:
        return self._run.step()

    def end(self) -> int:
        self._run.interrupt(timeout_s=_END_S)
        steps = self._run.step() + _LAST_STEPS
        self._run.program = TREADLE  # who reads the run later finds its servers where they are
        self._run.start(f"experience.steps={steps}", "--allow-change", "experience.steps")
        self._run.finish(timeout_s=_END_S)
        return steps

    def account(self) -> list[Measure]:
        return account(self._run)

    def kill(self) -> None:
        self._run.kill()

    def harm(self, fault: Fault) -> int:
        if fault.kind in DEADLY:
            pid = self._signal(fault.target, signal.SIGKILL)
            if fault.kind == "lose":
                self._must(f"the death of {fault.target}", lambda: state_of(pid) in _GONE, 10)
                shutil.rmtree(self._run.directory / _STATE[fault.target], ignore_errors=True)
            return pid
        if fault.kind == "stop":
            pid = self._signal(fault.target, signal.SIGSTOP)
            self._must("a stop", lambda: state_of(pid) in ("T", None), 5)
            return pid
        if fault.kind == "disk":
            if self._disk is None:
                raise RunFailedError("no disk to fill")
            self._disk.fill()
        else:
            self._links.set(fault.target, fault.kind, **fault.settings)
        return 0

    def _signal(self, name: str, signum: signal.Signals) -> int:
        """To the process that is registered as `name`, which has to be alive."""
        self._must(f"{name} alive", lambda: self._run.victim(name) is not None, _PATIENCE_S)
        pid = self._run.victim(name)
        if pid is None or state_of(pid) not in ("R", "S", "D"):
            raise RunFailedError(f"{name}, {pid}, is no victim: {state_of(pid or 0)}")
        os.kill(pid, signum)
        return pid

    def heal(self, fault: Fault, pid: int) -> None:
        if fault.kind == "stop":
            with contextlib.suppress(ProcessLookupError):  # a successor ended it
                os.kill(pid, signal.SIGCONT)
        elif fault.kind == "disk" and self._disk is not None:
            self._disk.make_room()
        else:
            self._links.set(fault.target, "none")

    def recovered(self, name: str, pid: int, since: float) -> float | None:
        """As the links tell; a member that is on none answers this process."""
        self._must(f"the death of {name}", lambda: self._was_killed(pid), 10)
        if self._links.hears_of(name):
            return self._links.recovered(name, since, timeout_s=_RECOVERED_S)
        while time.monotonic() - since < _RECOVERED_S:
            # What it had started itself may answer a little longer.
            if self._run.victim(name) not in (None, pid) and self._answers(name):
                return time.monotonic() - since
            time.sleep(_LOOK_S)
        return None

    def _answers(self, name: str) -> bool:
        if name in KINDS:
            server = KINDS[name].recorded(self._run.directory)
            return server is not None and server.is_ready()
        address = read_yaml(self._run.directory / "config" / f"{name}.yaml")["listen"]
        with contextlib.redirect_stderr(io.StringIO()):
            return probe.main([address]) == 0

    def _was_killed(self, pid: int) -> bool:
        deaths = self._run.rows("supervisor", "death")
        return any(row["pid"] == pid and row["signal"] == "SIGKILL" for row in deaths)

    def _must(self, what: str, holds: Callable[[], bool], timeout_s: float) -> None:
        if not self._run.wait_for(what, holds, timeout_s=timeout_s):
            raise RunFailedError(f"the run ended while {what} was awaited\n{self._run.logs()}")


@contextlib.contextmanager
def processes(parent: Path, overlays: list[str], *, has_disk: bool) -> Generator[ProcessStack]:
    """A stack in a folder of its own; nothing of it runs at the end.

    With `has_disk` this process has mounts of its own.
    """
    disk = Disk(parent / "run") if has_disk else None
    of_services = _between_services(parent)
    to_servers = _to_servers(parent, overlays)
    run = SmallRun(parent / "run", *(each.override for each in of_services), overlays=overlays)
    if to_servers:
        addresses = {link.called: address for address, link in to_servers.items()}
        run.program = (str(LINKED), json.dumps(addresses))
    carried = [*of_services, *to_servers.values()]
    links = Links(carried, ProxyProcess(carried))
    means = Means(
        links=[each.name for each in carried],
        unframed=[each.name for each in to_servers.values()],
        forgetful=list(_STATE),
        disk=has_disk,
    )
    try:
        yield ProcessStack(run, links, means, disk)
    finally:
        run.kill()
        links.stop()
        if disk is not None:
            disk.unmount()


def _between_services(parent: Path) -> list[Link]:
    folder = parent / "links"
    folder.mkdir()
    return [
        Link(
            caller,
            called,
            listen=f"unix:{folder}/{caller}-{called}",
            target=f"unix:{sockets.path(parent / 'run', called)}",
        )
        for caller, called in ENDS
    ]


def _to_servers(parent: Path, overlays: list[str]) -> dict[str, Link]:
    """Links to the servers that the run will have of its own, by the addresses for clients."""
    run, found = parent / "run", dict[str, Link]()
    recipe = read_recipe(ROOT / RECIPE, overlays=[ROOT / path for path in overlays])
    if recipe.get("experience", {}).get("ledger", {}).get("name") == "redis":
        path, redis = parent / "links" / "redis", sockets.path(run, "redis")
        found[f"unix://{path}"] = Link(*LEDGER, listen=f"unix:{path}", target=f"unix:{redis}")
    if recipe.get("run", {}).get("doorbell", {}).get("name") == "nats":
        nats = NatsServer.of(run)
        nats.record()  # so that its port is known before it starts
        listen = f"127.0.0.1:{free_port()}"
        target = f"127.0.0.1:{nats.settings['port']}"
        found[f"nats://{listen}"] = Link(*BELL, listen=listen, target=target)
    return found
