"""For people to read, now and then: what the policy said, and why an attempt failed."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from treadle_agents.loop import Outcome
from treadle_core.episodes import Segment
from treadle_core.tickets import Ticket
from treadle_rollout.core.results import versions_of
from treadle_rollout.ports import Attempt, Failure
from treadle_runtime.tracker import Tracker

log = logging.getLogger(__name__)

EVERY_S: Final = 10.0
"""Least time between two transcripts."""
LONGEST: Final = 4000
"""Characters of a transcript, the mark of what was cut out included."""
_CUT = "\n[... cut ...]\n"


@dataclass(slots=True)
class Transcripts:
    """Logs rows `transcript` and `failure` (docs/metrics.md), at most one of each a while."""

    decode: Callable[[list[int]], str]
    """Of the policy's tokenizer, special tokens included: they show whose turn it is."""
    tracker: Tracker
    clock: Callable[[], float] = time.monotonic
    _next: float = field(default=float("-inf"), init=False)
    _next_failure: float = field(default=float("-inf"), init=False)

    def note(self, ticket: Ticket, segments: Sequence[Segment], outcome: Outcome) -> None:
        """Takes a completed episode. Never raises: a transcript is not worth an episode."""
        now = self.clock()
        if now < self._next:
            return
        self._next = now + EVERY_S
        try:
            self.tracker.log("transcript", self._row(ticket, segments, outcome))
        except Exception as error:  # noqa: BLE001, a tokenizer raises what it likes
            log.warning("no transcript of episode %s: %r", ticket.episode_id, error)

    def note_failure(self, attempt: Attempt, failure: Failure) -> None:
        """Takes a failed attempt."""
        now = self.clock()
        if now < self._next_failure:
            return
        self._next_failure = now + EVERY_S
        row = {"episode_id": attempt.episode_id, "attempt": attempt.number}
        why = {"class": str(failure.failure_class), "message": shortened(failure.message)}
        self.tracker.log("failure", row | why)

    def _row(
        self, ticket: Ticket, segments: Sequence[Segment], outcome: Outcome
    ) -> dict[str, float | int | str]:
        row: dict[str, float | int | str] = {
            "episode_id": ticket.episode_id,
            "task_id": ticket.task_id,
            "attempt": ticket.attempt,
            "version": max(versions_of(segments)),
            "text": shortened("\n".join(map(self._text, segments))),
        }
        return row if outcome.reward is None else row | {"reward": outcome.reward}

    def _text(self, segment: Segment) -> str:
        """The segment as text; of a long one only what may be shown is decoded."""
        ids = segment.token_ids.tolist()
        if len(ids) <= 2 * LONGEST:
            return self.decode(ids)
        return self.decode(ids[:LONGEST]) + _CUT + self.decode(ids[-LONGEST:])


def shortened(text: str) -> str:
    """At most LONGEST characters; the middle is cut out, and a mark stands for it."""
    if len(text) <= LONGEST:
        return text
    kept = LONGEST - len(_CUT)
    return text[: kept - kept // 2] + _CUT + text[-(kept // 2) :]
