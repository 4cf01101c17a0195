"""What a replica holds and what it has done: bookkeeping without clocks or calls."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from treadle_rollout.ports import Attempt


@dataclass(slots=True)
class ReplicaState:
    """Slots, attempts and counts of one replica. Times are seconds of one monotonic clock."""

    slots: int
    """Episodes that may run at once."""
    started_at: float
    draining: bool = False
    """Nothing more is leased."""
    sampled_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    """Attempts by how they ended: "completed", "failed_policy", "stopped", ..."""
    sessions: Counter[str] = field(default_factory=Counter[str])
    """What happened in sessions of the gateway: "requests", "replayed", "untrained.cut", ..."""
    _running: set[Attempt] = field(default_factory=set[Attempt], init=False)
    _waited_s: float = field(default=0.0, init=False)
    _waiting_since: float | None = field(default=None, init=False)

    @property
    def running(self) -> tuple[Attempt, ...]:
        """Attempts that hold a slot: until the ledger has their result."""
        return tuple(self._running)

    @property
    def free(self) -> int:
        """Slots that no attempt holds."""
        return max(0, self.slots - len(self._running))

    def start(self, attempt: Attempt) -> list[Attempt]:
        """Takes a slot; returns older attempts at the same episode, which are to be stopped."""
        older = [
            held
            for held in self._running
            if held.episode_id == attempt.episode_id and held.number < attempt.number
        ]
        self._running.add(attempt)
        return older

    def revoked(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Which of the attempts that the ledger no longer leases to us still run."""
        return [attempt for attempt in attempts if attempt in self._running]

    def end(self, attempt: Attempt, how: str) -> None:
        """Frees the slot of an attempt and counts how it ended."""
        self._running.discard(attempt)
        self.counts[how] += 1

    def begin_wait(self, now: float) -> None:
        """A slot is free and a ticket is being asked for."""
        if self._waiting_since is None:
            self._waiting_since = now

    def end_wait(self, now: float) -> None:
        """The asking was answered."""
        self._waited_s = self.waited_s(now)
        self._waiting_since = None

    def waited_s(self, now: float) -> float:
        """Seconds in which a slot was free and no ticket was to be had."""
        since = 0.0 if self._waiting_since is None else now - self._waiting_since
        return self._waited_s + since

    def row(self, served_version: int, now: float) -> dict[str, float]:
        """The state as numbers by name (docs/metrics.md); counts are since the start."""
        return {
            "served_version": served_version,
            "slots": self.slots,
            "running": len(self._running),
            "sampled_tokens": self.sampled_tokens,
            "waited_s": round(self.waited_s(now), 3),
            "up_s": round(now - self.started_at, 3),
            **{f"attempts_{how}": count for how, count in sorted(self.counts.items())},
            **{f"gateway_{what}": count for what, count in sorted(self.sessions.items())},
        }
