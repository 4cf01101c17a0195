"""Keeps child processes running until they are done, and ends them in order.

A child is started in a session of its own, so that a terminal's Ctrl-C reaches only the supervisor.
It watches the reading end of a pipe whose writing end the supervisor and every child that drains
before it hold: when all of these are gone, however they went, it is its turn to drain.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from treadle_runtime.config import BAD_CONFIGURATION
from treadle_runtime.server import SUPERVISOR_FD

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 15.0
_STEADY_S = 30.0
"""A child that lived this long starts its count of deaths anew."""
_MOST_DEATHS = 6
_LAST_WORDS = 2000


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one child."""

    name: str
    command: tuple[str, ...]
    log_path: Path


class ChildFailedError(RuntimeError):
    """A child cannot be kept running; the message says which, why, and its last words."""


@dataclass(slots=True)
class Child:
    """One supervised process, over all its lives."""

    spec: ChildSpec
    process: asyncio.subprocess.Process | None = None
    deaths: int = 0
    stopping: bool = False
    watches: int = -1
    """Pipe whose end tells the child that it is its turn to drain."""
    holds: tuple[int, ...] = ()
    """Pipes of the children that drain after it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it ended with status 0, or was told to stop and did."""


class Supervisor:
    """Starts children, restarts those that die, and reports the cause of each death."""

    def __init__(self, specs: Sequence[ChildSpec]) -> None:
        """Takes the children in the order in which they drain."""
        self._children = {spec.name: Child(spec) for spec in specs}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        pipes = [os.pipe() for _ in specs]
        for place, child in enumerate(self._children.values()):
            child.watches = pipes[place][0]
            child.holds = tuple(write for _, write in pipes[place + 1 :])

    def start(self) -> None:
        """Starts and from now on supervises every child."""
        for name, child in self._children.items():
            self._tasks[name] = asyncio.ensure_future(self._keep(child))

    async def until_done(self, names: Sequence[str]) -> None:
        """Returns when all the named children are done.

        Raises:
            ChildFailedError: any child, named or not, cannot be kept running.
        """
        everyone = asyncio.ensure_future(self._all_done(names))
        try:
            while not everyone.done():
                pending = [task for task in self._tasks.values() if not task.done()]
                await asyncio.wait([everyone, *pending], return_when=asyncio.FIRST_COMPLETED)
                for task in self._tasks.values():
                    if task.done() and (error := task.exception()):
                        raise error
        finally:
            everyone.cancel()

    async def _all_done(self, names: Sequence[str]) -> None:
        for name in names:
            await self._children[name].done.wait()

    async def drain(self, *, grace_s: float) -> None:
        """Ends the children one after another, in their order; each has `grace_s` seconds."""
        for name in self._children:
            await self._stop(name, grace_s)

    async def _stop(self, name: str, grace_s: float) -> None:
        child = self._children[name]
        child.stopping = True
        _signal(child, signal.SIGTERM)
        task = self._tasks[name]
        await asyncio.wait([task], timeout=grace_s)
        if not task.done():
            log.warning("%s did not drain within %.0f s; killed", name, grace_s)
            _signal(child, signal.SIGKILL)
            await asyncio.wait([task], timeout=5.0)

    def kill(self) -> None:
        """Ends every child at once."""
        for child in self._children.values():
            child.stopping = True
            _signal(child, signal.SIGKILL)

    async def _keep(self, child: Child) -> None:
        while not child.stopping:
            began = time.monotonic()
            code = await self._live(child)
            if code == 0 or child.stopping:
                break
            lived_s = time.monotonic() - began
            child.deaths = 1 if lived_s > _STEADY_S else child.deaths + 1
            cause = _cause(child, code, lived_s)
            if code == BAD_CONFIGURATION or child.deaths >= _MOST_DEATHS:
                raise ChildFailedError(cause)
            delay_s = min(_FIRST_DELAY_S * 2 ** (child.deaths - 1), _LONGEST_DELAY_S)
            log.warning("%s; restarted in %.1f s", cause, delay_s)
            await asyncio.sleep(delay_s)
        child.done.set()

    async def _live(self, child: Child) -> int:
        """Runs one life of a child; returns its exit status, negative for a signal."""
        spec = child.spec
        env = {"OMP_NUM_THREADS": "1", **os.environ, SUPERVISOR_FD: str(child.watches)}
        with spec.log_path.open("ab") as output:
            child.process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                pass_fds=(child.watches, *child.holds),
                start_new_session=True,
            )
        if child.stopping:  # told to stop while it was being started
            _signal(child, signal.SIGTERM)
        return await child.process.wait()


def _signal(child: Child, signum: signal.Signals) -> None:
    if child.process is not None and child.process.returncode is None:
        child.process.send_signal(signum)


def _cause(child: Child, code: int, lived_s: float) -> str:
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
    words = child.spec.log_path.read_bytes()[-_LAST_WORDS:].decode(errors="replace")
    last = "\n".join(f"  {line}" for line in words.splitlines()[-8:])
    return f"{child.spec.name} ended with {how} after {lived_s:.1f} s; its last words:\n{last}"
