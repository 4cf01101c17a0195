"""Plays scenes on a run: each fault is done, seen to be done, and healed."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from links import ON_LINKS, Links
from nemesis import DEADLY, STATE, Fault, Scene
from small_run import RunFailedError, SmallRun, state_of

from treadle_runtime import probe
from treadle_runtime.config import read_yaml
from treadle_runtime.local_servers.known import KINDS

_PATIENCE_S = 60.0
_RECOVERED_S = 60.0
"""Longest wait for a recovery; what takes longer is none."""
_LOOK_S = 0.1
_GONE = ("Z", "X", None)
_DISK_SIZE = "192m"


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


class Stage:
    """A run, its links and its disk, and what was done to them."""

    def __init__(self, run: SmallRun, links: Links, disk: Disk | None) -> None:
        """Counts from nothing."""
        self.run = run
        self.done: Counter[str] = Counter()
        """Faults that were done and seen, by kind."""
        self.victims: Counter[str] = Counter()
        """Who was killed how often."""
        self.recoveries: list[float] = []
        """Seconds from each kill to the recovery, of those that had one."""
        self._links = links
        self._disk = disk

    @classmethod
    @contextlib.contextmanager
    def set_up(cls, parent: Path, overlays: list[str], disk: Disk | None) -> "Generator[Stage]":
        """Nothing of it is left at the end."""
        sockets = parent / "links"
        sockets.mkdir()
        links = Links(parent / "run", sockets)
        run = SmallRun(parent / "run", *links.overrides(), overlays=overlays)
        links.start()
        try:
            yield cls(run, links, disk)
        finally:
            run.kill()
            links.stop()
            if disk is not None:
                disk.unmount()

    def play(self, scene: Scene) -> dict[str, Any]:
        """Does it all, heals it all, and waits for who was killed; returns what came of it.

        Raises RunFailedError where a victim does not do what it must.
        """
        began = time.monotonic()
        pids: dict[str, int] = {}
        back: dict[str, Future[float | None]] = {}
        healing: list[tuple[float, Fault, int]] = []
        with ThreadPoolExecutor() as pool:
            for fault in scene.faults:
                pid, at = self._begin(fault), time.monotonic()
                if fault.kind in DEADLY:
                    pids[fault.target] = pid
                    back[fault.target] = pool.submit(self._back, fault.target, pid, at)
                else:
                    healing.append((at + fault.lasts_s, fault, pid))
                self.done[fault.kind] += 1
            for until, fault, pid in sorted(healing, key=lambda each: each[0]):
                time.sleep(max(0.0, until - time.monotonic()))  # the fault itself
                self._heal(fault, pid)
            took = {name: each.result() for name, each in back.items()}
        self.victims.update(took.keys())
        self.recoveries += [each for each in took.values() if each is not None]
        return {
            "faults": [str(fault) for fault in scene.faults],
            "pids": pids,
            "recovered_s": {name: each and round(each, 2) for name, each in took.items()},
            "seconds": round(time.monotonic() - began, 2),
        }

    def _begin(self, fault: Fault) -> int:
        if fault.kind in DEADLY:
            pid = self._signal(fault.target, signal.SIGKILL)
            if fault.kind == "lose":
                self._must(f"the death of {fault.target}", lambda: state_of(pid) in _GONE, 10)
                shutil.rmtree(self.run.directory / STATE[fault.target], ignore_errors=True)
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
        self._must(f"{name} alive", lambda: self.run.victim(name) is not None, _PATIENCE_S)
        pid = self.run.victim(name)
        if pid is None or state_of(pid) not in ("R", "S", "D"):
            raise RunFailedError(f"{name}, {pid}, is no victim: {state_of(pid or 0)}")
        os.kill(pid, signum)
        return pid

    def _heal(self, fault: Fault, pid: int) -> None:
        if fault.kind == "stop":
            with contextlib.suppress(ProcessLookupError):  # a successor ended it
                os.kill(pid, signal.SIGCONT)
        elif fault.kind == "disk" and self._disk is not None:
            self._disk.make_room()
        else:
            self._links.set(fault.target, "none")

    def _back(self, name: str, pid: int, at: float) -> float | None:
        """Seconds from `at`, its death, to the victim's first answer; None when it has none.

        It answers another service, as the links tell; one that is on no link answers this process.
        """
        self._must(f"the death of {name}", lambda: self._was_killed(pid), 10)
        if name in ON_LINKS:
            return self._links.recovered(name, at, timeout_s=_RECOVERED_S)
        while time.monotonic() - at < _RECOVERED_S:
            # What it had started itself may answer a little longer.
            if self.run.victim(name) not in (None, pid) and self._answers(name):
                return time.monotonic() - at
            time.sleep(_LOOK_S)
        return None

    def _answers(self, name: str) -> bool:
        if name in KINDS:
            server = KINDS[name].recorded(self.run.directory)
            return server is not None and server.is_ready()
        address = read_yaml(self.run.directory / "config" / f"{name}.yaml")["listen"]
        with contextlib.redirect_stderr(io.StringIO()):
            return probe.main([address]) == 0

    def _was_killed(self, pid: int) -> bool:
        deaths = self.run.rows("supervisor", "death")
        return any(row["pid"] == pid and row["signal"] == "SIGKILL" for row in deaths)

    def _must(self, what: str, holds: Callable[[], bool], timeout_s: float) -> None:
        if not self.run.wait_for(what, holds, timeout_s=timeout_s):
            raise RunFailedError(f"the run ended while {what} was awaited\n{self.run.logs()}")
