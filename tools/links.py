"""The links between the services of a run, led through the fault proxy, and what answered."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROXY = Path(__file__).parent.parent / "tests" / "chaos" / "fault_proxy.py"
ENDS = (
    ("rollout", "experience"),
    ("trainer", "experience"),
    ("refit", "experience"),
    ("rollout", "refit"),
    ("trainer", "refit"),
)
"""Who calls whom."""
NAMES = tuple(f"{caller}-{called}" for caller, called in ENDS)
ON_LINKS = {name for ends in ENDS for name in ends}
"""Who is heard of here."""
_CALLED = {called for _, called in ENDS}


@dataclass(frozen=True, slots=True)
class Answer:
    """The first call that was answered on a connection; times of the monotonic clock, seconds."""

    link: str
    opened: float
    answered: float


class Links:
    """A proxy process between the services of one run directory."""

    def __init__(self, run: Path, sockets: Path) -> None:
        """Starts nothing; `sockets` is a folder with a short path, for the proxy's own."""
        self._run = run
        self._sockets = sockets
        self._answers: list[Answer] = []
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = False

    def overrides(self) -> list[str]:
        """What the recipe has to say for the services to call by the proxy."""
        return [
            f"{caller}.{called}_address=unix:{self._sockets}/{caller}-{called}"
            for caller, called in ENDS
        ]

    def start(self) -> None:
        """Carries from here on."""
        words = [str(PROXY)]
        for name, (_, called) in zip(NAMES, ENDS, strict=True):
            target = f"unix:{self._run}/sockets/{called}.sock"
            words += ["--link", name, f"unix:{self._sockets}/{name}", target]
        self._process = subprocess.Popen(  # noqa: S603, our own
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()
        if not self._wait(lambda: self._is_ready, 10):
            raise RuntimeError("the fault proxy does not start")

    def _listen(self, process: "subprocess.Popen[str]") -> None:
        for line in process.stdout or ():
            row = json.loads(line)
            with self._changed:
                if "ready" in row:
                    self._is_ready = True
                else:
                    self._answers.append(Answer(**row))
                self._changed.notify_all()

    def set(self, link: str, fault: str, **settings: float) -> None:
        """Does it to a link; `none` heals it."""
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("the fault proxy was never started")
        self._process.stdin.write(json.dumps({"link": link, "fault": fault, **settings}) + "\n")
        self._process.stdin.flush()

    def recovered(self, victim: str, since: float, *, timeout_s: float) -> float | None:
        """Seconds from `since` until a call was answered on a connection made after it.

        The call is another service's to the victim; where nobody calls it, the victim's own to
        another. None when there is none in time.
        """
        place = 1 if victim in _CALLED else 0
        links = {name for name, ends in zip(NAMES, ENDS, strict=True) if ends[place] == victim}

        def first() -> float | None:
            times = [
                each.answered
                for each in self._answers
                if each.link in links and each.opened > since
            ]
            return min(times, default=None)

        self._wait(lambda: first() is not None, since + timeout_s - time.monotonic())
        with self._changed:
            at = first()
        return None if at is None else at - since

    def _wait(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(holds, max(0.0, timeout_s))

    def stop(self) -> None:
        """Ends the proxy."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait(10)
