"""Plays scenes on a run: each fault is done, seen to be done, and healed."""

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from nemesis import DEADLY, Fault, Means, Scene

from treadle_runtime.measures import Measure


class Stack(Protocol):
    """A run, on what it stands on, and all that can be done to it."""

    @property
    def means(self) -> Means:
        """What it can suffer."""
        ...

    def begin(self) -> list[str]:
        """Starts it; returns its members by name after its first step."""
        ...

    def step(self) -> int:
        """Last step that the trainer finished."""
        ...

    def harm(self, fault: Fault) -> int:
        """Does it; returns the process that suffers it, 0 where it is none.

        Raises RunFailedError where a member does not do what it must.
        """
        ...

    def heal(self, fault: Fault, pid: int) -> None:
        """Ends it; `pid` is what `harm` returned."""
        ...

    def recovered(self, name: str, pid: int, since: float) -> float | None:
        """Seconds from `since`, its death, to a member's first answer; None when it has none.

        Has it started again where nobody else does.
        """
        ...

    def end(self) -> int:
        """Lets it end well some steps later; returns the step that is to be its last."""
        ...

    def account(self) -> list[Measure]:
        """Reconciles every id."""
        ...

    def kill(self) -> None:
        """Ends what is left of it; what it has written stays."""
        ...


class Stage:
    """A stack, and what was done to it."""

    def __init__(self, stack: Stack) -> None:
        """Counts from nothing."""
        self.stack = stack
        self.done: Counter[str] = Counter()
        """Faults that were done and seen, by kind."""
        self.victims: Counter[str] = Counter()
        """Who died how often."""
        self.recoveries: list[float] = []
        """Seconds from each death to the recovery, of those that had one."""

    def play(self, scene: Scene) -> dict[str, Any]:
        """Does it all, heals it all, and waits for who died; returns what came of it.

        Raises RunFailedError where a victim does not do what it must.
        """
        began = time.monotonic()
        pids: dict[str, int] = {}
        back: dict[str, Future[float | None]] = {}
        healing: list[tuple[float, Fault, int]] = []
        with ThreadPoolExecutor() as pool:
            for fault in scene.faults:
                pid, at = self.stack.harm(fault), time.monotonic()
                if fault.kind in DEADLY:
                    pids[fault.target] = pid
                    back[fault.target] = pool.submit(self.stack.recovered, fault.target, pid, at)
                else:
                    healing.append((at + fault.lasts_s, fault, pid))
                self.done[fault.kind] += 1
            for until, fault, pid in sorted(healing, key=lambda each: each[0]):
                time.sleep(max(0.0, until - time.monotonic()))  # the fault itself
                self.stack.heal(fault, pid)
            took = {name: each.result() for name, each in back.items()}
        self.victims.update(took.keys())
        self.recoveries += [each for each in took.values() if each is not None]
        return {
            "faults": [str(fault) for fault in scene.faults],
            "pids": pids,
            "recovered_s": {name: each and round(each, 2) for name, each in took.items()},
            "seconds": round(time.monotonic() - began, 2),
        }
