"""Which rank a process is, and how the others start.

Under torchrun every rank is told by its environment. Otherwise the process is rank 0, starts the
others as its children, and ends when one of them does; they end with it, however it goes.
"""

import asyncio
import ctypes
import logging
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle_core.errors import InvalidFieldError
from treadle_runtime import last_call, server
from treadle_trainer.adapters.process_group import Store, store_of
from treadle_trainer.ports import RanksLostError
from treadle_trainer.waiting import cancel

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
LEADER = "TREADLE_LEADER_PID"
"""Environment variable of a child: the process that it ends with."""

_GRACE_S = 10.0
"""How long a child may take to end once it was told to."""
_PR_SET_PDEATHSIG = 1
_OURS = (server.SUPERVISOR_FD, last_call.DESCRIPTOR)
"""Descriptors of rank 0 that no child has."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among the ranks."""

    rank: int
    size: int
    told: bool
    """By torchrun, or by the rank 0 that started it."""


def place_of(environment: Mapping[str, str], ranks: int) -> Place:
    """By torchrun's variables, else rank 0 of the recipe's `ranks`.

    Raises InvalidFieldError where both say a number of ranks, and not the same.
    """
    if "RANK" not in environment:
        return Place(0, ranks, told=False)
    size = int(environment["WORLD_SIZE"])
    if ranks not in (1, size):
        raise InvalidFieldError("ranks", limit=f"{size} as WORLD_SIZE, or 1", value=ranks)
    return Place(int(environment["RANK"]), size, told=True)


def told_store(environment: Mapping[str, str], place: Place) -> Store:
    """The store that the environment names."""
    by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return store_of(
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        life=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        is_master=place.rank == 0 and not by_agent,
    )


def end_with_leader(environment: Mapping[str, str]) -> None:
    """Has the kernel end this process with its rank 0, and leaves signals for all to that one."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    leader = environment.get(LEADER)
    if leader is not None:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(leader):  # it ended before the kernel was told
            raise SystemExit(1)


class Children:
    """Ranks 1 and on, as child processes."""

    def __init__(self, size: int, command: Sequence[str]) -> None:
        """Listens on a port of loopback, held from now on, where they are to find each other."""
        self._size = size
        self._command = command
        listening = socket.create_server((LOOPBACK, 0))
        self._port = listening.getsockname()[1]
        self._store = store_of(
            LOOPBACK,
            self._port,
            life="0",
            is_master=True,
            master_listen_fd=listening.detach(),
        )
        self._ended: str = ""

    def store(self) -> Store:
        """Where rank 0 finds them."""
        return self._store

    def check(self) -> None:
        """Raises RanksLostError where one has ended."""
        if self._ended:
            raise RanksLostError(self._ended, field="ranks", limit=self._size)

    async def beside(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts them, and awaits `work`, which tells them when to end.

        Raises RanksLostError when one ends otherwise. Leaves none behind, also of those that stand
        still.
        """
        started = [await self._start(rank) for rank in range(1, self._size)]
        waits = [asyncio.ensure_future(process.wait()) for process in started]
        working = asyncio.ensure_future(work())
        try:
            while not working.done():
                running = [each for each in waits if not each.done()]
                await asyncio.wait([working, *running], return_when=asyncio.FIRST_COMPLETED)
                if any(each.done() and each.result() for each in waits):
                    codes = [process.returncode for process in started]
                    self._ended = f"a rank ended: exit statuses from rank 1 on are {codes}"
                    self.check()
            await working
            await asyncio.wait(waits, timeout=_GRACE_S)
        finally:
            for process in started:
                if process.returncode is None:
                    process.kill()
            await asyncio.gather(*waits, return_exceptions=True)
            await cancel(working)

    async def _start(self, rank: int) -> asyncio.subprocess.Process:
        environment = {name: value for name, value in os.environ.items() if name not in _OURS}
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._size),
            "LOCAL_WORLD_SIZE": str(self._size),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._port),
            LEADER: str(os.getpid()),
        }
        return await asyncio.create_subprocess_exec(*self._command, env=environment)


def stay_on_loopback() -> None:
    """Keeps the ranks of one machine's trainer to loopback; sets what children inherit."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
