"""When leases and deadlines end: in memory only, on a monotonic clock.

A second fold of the same transitions that keeps times instead of facts. After a load, every
issued episode gets a fresh lease and a fresh deadline.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from treadle_experience.core.state import Attempt, EpisodeState, RunState
from treadle_experience.core.transitions import AttemptEnded, EpisodeDone, TicketIssued, Transition


@dataclass(slots=True)
class _Lease:
    attempt: int
    until: float
    deadline: float


@dataclass(slots=True)
class Leases:
    """The leases of one run. `now` is monotonic seconds everywhere."""

    lease_s: float
    deadline_s: float
    _leases: dict[str, _Lease] = field(default_factory=dict[str, _Lease])

    def start(self, state: RunState, now: float) -> None:
        """Gives every issued episode of a loaded state a fresh lease."""
        for running in state.running.values():
            for episode_id in running:
                self._grant(episode_id, state.episodes[episode_id].attempt, now)

    def follow(self, transitions: Iterable[Transition], now: float) -> None:
        """Grants what was issued and forgets what ended."""
        for transition in transitions:
            if isinstance(transition, TicketIssued):
                self._grant(transition.episode_id, transition.attempt, now)
            elif isinstance(transition, EpisodeDone | AttemptEnded):
                self._leases.pop(transition.episode_id, None)

    def renew(self, attempt: Attempt, now: float) -> None:
        """Extends the lease of an attempt; never beyond its deadline."""
        lease = self._leases.get(attempt.episode_id)
        if lease is not None and lease.attempt == attempt.attempt:
            lease.until = min(now + self.lease_s, lease.deadline)

    def forgive(self, seconds: float) -> None:
        """Extends all leases by a time in which nobody could renew: this process stood still."""
        for lease in self._leases.values():
            lease.until += seconds
            lease.deadline += seconds

    def due(self, state: RunState, now: float) -> list[Attempt]:
        """The attempts whose lease has ended, oldest grant first."""
        ended: list[Attempt] = []
        for episode_id, lease in list(self._leases.items()):
            episode = state.episodes.get(episode_id)
            if episode is None or episode.state is not EpisodeState.ISSUED:
                del self._leases[episode_id]  # revoked together with its task
            elif lease.until <= now:
                ended.append(Attempt(episode_id, lease.attempt))
        return ended

    def _grant(self, episode_id: str, attempt: int, now: float) -> None:
        # The replica ends an episode at its deadline and says why; one lease later nobody will.
        deadline = now + self.deadline_s + self.lease_s
        self._leases.pop(episode_id, None)
        self._leases[episode_id] = _Lease(attempt, now + self.lease_s, deadline)
