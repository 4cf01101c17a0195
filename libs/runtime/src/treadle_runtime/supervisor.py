"""Keeps child processes running until they are done, and ends them in order.

A child is started in a session of its own, so that a terminal's Ctrl-C reaches only the supervisor.
It watches the reading end of a pipe whose writing end the supervisor and every child that drains
before it hold: when all of these are gone, however they went, it is its turn to drain.
"""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle_runtime import deaths, last_call, liveness
from treadle_runtime.config import BAD_CONFIGURATION
from treadle_runtime.deaths import Death
from treadle_runtime.drain_order import SUPERVISOR_FD
from treadle_runtime.tracker import Tracker

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 15.0
_STEADY_S = 30.0
"""A child that lived this long starts its count of deaths anew."""
_MOST_DEATHS = 6
_MOST_OF_PROVEN = 20
"""The same, of a child that answered in one of its lives: what ends it now, a full disk or a server
that is away, may pass."""
_LAST_WORDS = 2000

HUNG_S = 60.0
"""Seconds of silence after which a service hangs, unless the recipe says otherwise."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one child."""

    name: str
    command: tuple[str, ...]
    log_path: Path
    address: str = ""
    """Where it serves its health; empty: nobody asks."""
    answers: Callable[[], bool] | None = None
    """Whether it answers, of a child without an address; blocks for a second at most."""
    serves: bool = False
    """It has no work that could be done: ended with status 0 unasked it is started again too."""


class ChildFailedError(RuntimeError):
    """A child cannot be kept running; the message says which, why, and its last words."""


@dataclass(slots=True)
class Child:
    """One supervised process, over all its lives."""

    spec: ChildSpec
    pidfd: int = -1
    """The life that goes on; -1 between two."""
    deaths: int = 0
    """In a row, each after a short life."""
    failures: int = 0
    """In a row, each after a short life that never answered."""
    answered: bool = False
    """In this life."""
    proven: bool = False
    """It has answered, in whatever life."""
    restarts: int = 0
    killed: bool = False
    """The supervisor sent this life SIGKILL."""
    hung: bool = False
    """Because it no longer answered."""
    stopping: bool = False
    watches: int = -1
    """Pipe whose end tells the child that it is its turn to drain."""
    holds: tuple[int, ...] = ()
    """Pipes of the children that drain after it."""
    done: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it ended with status 0, or was told to stop and did."""


class Supervisor:
    """Starts children, kills those that hang, restarts those that die, and reports why they did."""

    def __init__(
        self, specs: Sequence[ChildSpec], tracker: Tracker, *, hung_s: float = HUNG_S
    ) -> None:
        """Takes the children in the order in which they drain, and where lives are recorded.

        A child that has answered once, and has not for `hung_s` seconds, hangs.
        """
        self._tracker = tracker
        self._hung_s = hung_s
        self._children = {spec.name: Child(spec) for spec in specs}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        pipes = [os.pipe() for _ in specs]
        for place, child in enumerate(self._children.values()):
            child.watches = pipes[place][0]
            child.holds = tuple(write for _, write in pipes[place + 1 :])

    def start(self, names: Sequence[str] | None = None) -> None:
        """Starts and from now on supervises the named children, or all that are not yet."""
        for name in self._children if names is None else names:
            if name not in self._tasks:
                self._tasks[name] = asyncio.ensure_future(self._keep(self._children[name]))

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
        child, task = self._children[name], self._tasks.get(name)
        child.stopping = True
        if task is None:
            return
        _signal(child, signal.SIGTERM)
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
            death = await self._live(child)
            if death is None:
                break
            steady = death.lived_s > _STEADY_S
            child.deaths = 1 if steady else child.deaths + 1
            child.failures = 1 if steady or child.answered else child.failures + 1
            self._tracker.log("death", death.row())
            if child.stopping:
                if death.code != -signal.SIGTERM:  # told to end before it could say that it did
                    log.warning("%s", death)
                break
            most = _MOST_OF_PROVEN if child.proven else _MOST_DEATHS
            if death.code == BAD_CONFIGURATION or child.deaths >= most:
                raise ChildFailedError(f"{death}; its last words:\n{_last_words(child)}")
            delay_s = min(_FIRST_DELAY_S * 2 ** (child.failures - 1), _LONGEST_DELAY_S)
            log.warning("%s; restarted in %.1f s", death, delay_s)
            await asyncio.sleep(delay_s)
            child.restarts += 1
        child.done.set()

    async def _live(self, child: Child) -> Death | None:
        """Runs one life of a child; returns how it ended, None where it is done."""
        notes, kills, began = last_call.opened(), deaths.memory_kills(), time.monotonic()
        process = _started(child, notes)
        child.pidfd = os.pidfd_open(process.pid)
        child.killed = child.hung = child.answered = False
        try:
            self._tracker.log(
                "start",
                {"service": child.spec.name, "pid": process.pid, "restarts": child.restarts},
            )
            if child.stopping:  # told to stop while it was being started
                _signal(child, signal.SIGTERM)
            await self._until_ended(child)
            _, status, usage = os.wait4(process.pid, 0)  # noqa: ASYNC222, it has ended
            process.returncode = code = os.waitstatus_to_exitcode(status)
            last_rpc, ago_s = last_call.read(notes)
        finally:
            os.close(notes)
            os.close(child.pidfd)
            child.pidfd = -1
        asked = child.spec.serves and child.stopping and not child.killed
        if asked or (code == 0 and not child.spec.serves):
            return None
        return Death(
            service=child.spec.name,
            pid=process.pid,
            code=code,
            lived_s=time.monotonic() - began,
            peak_rss_mb=usage.ru_maxrss / 1024,
            memory_kill=deaths.memory_kill(
                code, sent_by_us=child.killed, before=kills, now=deaths.memory_kills()
            ),
            hung=child.hung,
            last_rpc=last_rpc,
            last_rpc_ago_s=ago_s,
            last_line=deaths.last_line(child.spec.log_path),
            restarts=child.restarts,
        )

    async def _until_ended(self, child: Child) -> None:
        """Waits for its end, and brings it about when it hangs, unless it is to end anyway."""
        waits = [asyncio.ensure_future(_readable(child.pidfd))]
        if hangs := self._hangs(child):
            waits.append(asyncio.ensure_future(hangs))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not (waits[0].done() or child.stopping):
                waits[1].result()
                child.hung = True
                _signal(child, signal.SIGKILL)
            await waits[0]
        finally:
            for wait in waits:
                wait.cancel()

    def _hangs(self, child: Child) -> Coroutine[Any, Any, None] | None:
        """Returns once a child hangs; None where nobody asks."""

        def answered() -> None:
            child.answered = child.proven = True

        if child.spec.address:
            return liveness.until_hung(child.spec.address, self._hung_s, answered)
        if child.spec.answers is None:
            return None
        ask = child.spec.answers
        return liveness.until_silent(lambda _: asyncio.to_thread(ask), self._hung_s, answered)


def _started(child: Child, notes: int) -> "subprocess.Popen[bytes]":
    spec = child.spec
    env = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        SUPERVISOR_FD: str(child.watches),
        last_call.DESCRIPTOR: str(notes),
    }
    with spec.log_path.open("ab") as output:
        return subprocess.Popen(  # noqa: S603, what the supervisor was made for
            spec.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            pass_fds=(child.watches, *child.holds, notes),
            start_new_session=True,
        )


async def _readable(descriptor: int) -> None:
    """Waits until a descriptor can be read; a pidfd can when its process has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)


def _signal(child: Child, signum: signal.Signals) -> None:
    if child.pidfd < 0:
        return
    child.killed = child.killed or signum is signal.SIGKILL
    with contextlib.suppress(ProcessLookupError):  # it has ended, and is about to be noticed
        signal.pidfd_send_signal(child.pidfd, signum)


def _last_words(child: Child) -> str:
    words = child.spec.log_path.read_bytes()[-_LAST_WORDS:].decode(errors="replace")
    return "\n".join(f"  {line}" for line in words.splitlines()[-8:])
