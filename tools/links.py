"""The links between the members of a run, led through the fault proxy, and what answered."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PROGRAM = Path(__file__).parent.parent / "tests" / "chaos" / "fault_proxy.py"
ENDS = (
    ("rollout", "experience"),
    ("trainer", "experience"),
    ("refit", "experience"),
    ("rollout", "refit"),
    ("trainer", "refit"),
)
"""Which service calls which."""
LEDGER, BELL, SIDECAR = ("experience", "redis"), ("services", "nats"), ("services", "payloads")
"""Who calls what a run on a fleet has beside; a recipe has one doorbell for all services."""
_READY_S = 30.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Link:
    """One way of calls; addresses as `unix:/path` or `host:port`."""

    caller: str
    called: str
    listen: str
    """Where the caller is told that the other is."""
    target: str
    """Where it is."""

    @property
    def name(self) -> str:
        return f"{self.caller}-{self.called}"

    @property
    def override(self) -> str:
        """What the recipe has to say for a service to call another by the proxy."""
        return f"{self.caller}.{self.called}_address={self.listen}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The first call that was answered on a connection; times of the monotonic clock, seconds."""

    link: str
    opened: float
    answered: float


class Proxy(Protocol):
    """A fault proxy that runs somewhere, on this machine's clock."""

    def lines(self) -> Iterable[str]:
        """What it says, until it ends."""
        ...

    def tell(self, line: str) -> None:
        """Tells it, whole, with its end."""
        ...

    def stop(self) -> None:
        """Ends it; nothing of it is left."""
        ...


class ProxyProcess:
    """A fault proxy as a process of this machine."""

    def __init__(self, links: Sequence[Link]) -> None:
        """Starts it."""
        self._process = subprocess.Popen(  # noqa: S603, our own
            [sys.executable, str(PROGRAM), *arguments(links)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def lines(self) -> Iterable[str]:
        if self._process.stdout is not None:
            with self._process.stdout as said:
                yield from said

    def tell(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(_END_S)


def arguments(links: Sequence[Link]) -> list[str]:
    """The command line that makes a fault proxy carry these."""
    return [word for each in links for word in ("--link", each.name, each.listen, each.target)]


class Links:
    """The links of one run, and the proxy that carries them."""

    def __init__(self, links: Sequence[Link], proxy: Proxy) -> None:
        """Returns when all are carried. Raises RuntimeError where they are not in time."""
        self._links = links
        self._proxy = proxy
        self._answers: list[Answer] = []
        self._changed = threading.Condition()
        self._is_ready = False
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()
        if not self._wait(lambda: self._is_ready, _READY_S):
            raise RuntimeError("the fault proxy does not start")

    def _listen(self) -> None:
        for line in self._proxy.lines():
            row = json.loads(line)
            with self._changed:
                if "ready" in row:
                    self._is_ready = True
                else:
                    self._answers.append(Answer(**row))
                self._changed.notify_all()

    def set(self, link: str, fault: str, **settings: float) -> None:
        """Does it to a link; `none` heals it."""
        self._proxy.tell(json.dumps({"link": link, "fault": fault, **settings}) + "\n")

    def hears_of(self, member: str) -> bool:
        """Whether calls of the member, or to it, pass here."""
        return any(member in (each.caller, each.called) for each in self._links)

    def recovered(self, victim: str, since: float, *, timeout_s: float) -> float | None:
        """Seconds from `since` until a call was answered on a connection made after it.

        The call is another's to the victim; where nobody calls it, the victim's own to another.
        None when there is none in time.
        """
        called = {each.name for each in self._links if each.called == victim}
        heard = called or {each.name for each in self._links if each.caller == victim}

        def first() -> float | None:
            times = [
                each.answered
                for each in self._answers
                if each.link in heard and each.opened > since
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
        """Nothing is carried any more."""
        self._proxy.stop()
        self._listening.join(_END_S)
