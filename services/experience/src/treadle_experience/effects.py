"""What follows from a transition once it is durable: rows, rings, and payloads that may go."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from statistics import stdev

from treadle_experience import ringing
from treadle_experience.core import evaluation
from treadle_experience.core.state import EvaluationKey, RunState
from treadle_experience.core.transitions import EvaluationScored, PayloadsReleased, Transition
from treadle_payloads.store import Hold, PayloadReference
from treadle_runtime.doorbell import Doorbell
from treadle_runtime.tracker import Tracker


@dataclass(slots=True)
class Effects:
    """Called with durable transitions, in order. Everything here may happen twice."""

    state: RunState
    tracker: Tracker
    bell: Doorbell
    released: "asyncio.Queue[Hold]" = field(default_factory=asyncio.Queue[Hold])
    """What the payload store may let go."""
    _position: int = field(default=0, init=False)

    def follow(self, transition: Transition) -> None:
        """Does what `transition` asks for."""
        for topic in ringing.topics(transition):
            self.bell.ring(topic)
        if isinstance(transition, EvaluationScored):
            self.tracker.log("evaluation", self._evaluation_row(transition))
        elif isinstance(transition, PayloadsReleased):
            # Where a transition does not say who held them, the sweeper finds them.
            held = zip(transition.stored, transition.held, strict=False)
            for sha256, (node, episode_id) in held:
                self.released.put_nowait(Hold(PayloadReference(sha256, 0, node), episode_id))

    def log_counts(self, more: Mapping[str, float | str]) -> None:
        """Logs a row of counts and of what `more` says, where there is news since the last one."""
        state = self.state
        if state.position == self._position:
            return
        self._position = state.position
        row: dict[str, float | int | str] = {
            "position": state.position,
            "trained_step": state.trained_step,
            "version": state.newest_version,
            "payload_bytes": state.payload_bytes,
        }
        row |= {f"tasks_{name}": count for name, count in state.task_counts.items()}
        row |= {f"episodes_{name}": count for name, count in state.episode_counts.items()}
        row |= {f"failures_{name}": count for name, count in state.failures.items()}
        row |= {f"reason_{name}": count for name, count in state.reasons.items()}
        row["lost_payloads"] = state.lost_payloads
        row["forgotten"] = state.forgotten_tasks.total()
        self.tracker.log("counts", row | self.bell.row() | dict(more))

    def _evaluation_row(self, scored: EvaluationScored) -> dict[str, float | int | str]:
        row: dict[str, float | int | str] = {
            "evaluation": scored.name,
            "step": scored.step,
            "num_scored": scored.num_scored,
            "num_failed": scored.num_failed,
            "oldest_version": scored.oldest_version,
            "newest_version": scored.newest_version,
        }
        if scored.score is not None:
            row["score"] = scored.score
        key = EvaluationKey(scored.step, scored.name)
        known = self.state.evaluations.get(key)
        rewards = evaluation.rewards(self.state, known) if known else []
        if len(rewards) == scored.num_scored > 1:  # else the run forgot some of them meanwhile
            row["std_error"] = stdev(rewards) / sqrt(len(rewards))
        return row
