"""Continuous batching: calls join and leave between two forwards, and so do weights."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_rollout.adapters.transformers_engine.batch import Index, plan
from treadle_rollout.adapters.transformers_engine.policy import Policy
from treadle_rollout.adapters.transformers_engine.sampling import sample
from treadle_rollout.adapters.transformers_engine.shaping import Drawn, Shape, take
from treadle_rollout.adapters.transformers_engine.slots import Slots
from treadle_rollout.core.errors import NonFiniteLogprobError
from treadle_rollout.ports import GenerationRequest


@dataclass(slots=True)
class Counts:
    """What a decoder did since it was made."""

    forwards: int = 0
    fed: int = 0
    """Tokens that went through the model."""
    sampled: int = 0
    non_finite: int = 0
    """Calls that failed for a log-probability that was not finite."""


class Step(NamedTuple):
    """What came of one forward."""

    ended: list[tuple[int, Generated | TreadleError]]
    """Calls that ended in it."""
    pieces: list[tuple[int, Generated]]
    """What it sampled for calls that are listened to."""


class _Waiting(NamedTuple):
    request: GenerationRequest
    shape: Shape | None
    listened: bool


class Decoder:
    """Runs the calls that it was given, a step at a time. Not for many threads at once.

    Args:
        policy: what decides; turned to its packed attention.
        slots: calls that run at once.
        max_context: most tokens of prompt and generation together.
        stop_ids: tokens that end a turn.
        batch_tokens: most tokens of one forward, unless more slots than that feed one each.
        singly: a minority of slots that lack up to so many tokens feed them one by one, beside
            those that decode. Right where batches of single tokens are much cheaper than others.
        seed: of the sampling.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        max_context: int,
        stop_ids: frozenset[int],
        batch_tokens: int,
        singly: int = 1,
        seed: int,
    ) -> None:
        self.counts = Counts()
        self.version = 0
        """Served now; 0 before the first install, and then nothing runs."""
        self._policy = policy
        self._slots = Slots(slots, max_context)
        self._waiting: dict[int, _Waiting] = {}
        self._batch_tokens = batch_tokens
        self._singly = singly
        self._stops = np.zeros(policy.vocabulary, np.bool_)
        self._stops[list(stop_ids)] = True
        self._generator = torch.Generator(policy.device).manual_seed(seed)

    @property
    def idle(self) -> bool:
        """A step would do nothing."""
        return not self._slots.running and not (self._waiting and self.version)

    def submit(
        self,
        call: int,
        request: GenerationRequest,
        shape: Shape | None = None,
        *,
        listened: bool = False,
    ) -> None:
        """Queues a call; it sits in the next slot that is had, first come, first served."""
        self._waiting[call] = _Waiting(request, shape, listened)

    def cancel(self, call: int) -> None:
        """Frees the place of a call; one that has ended is ignored."""
        self._waiting.pop(call, None)
        slot = self._slots.slot_of(call)
        if slot is not None:
            self._drop(slot)

    def release(self, session: str) -> None:
        """Forgets what is cached for a session."""
        self._slots.release(session)

    def install(self, version: int) -> None:
        """Serves the weights that arrived; what runs recomputes its keys under them."""
        self._policy.install()
        self._slots.cached[:] = 0
        self.version = version

    def alias(self, version: int) -> None:
        """Serves the same weights under another number; keys of these weights stay."""
        self.version = version

    def step(self) -> Step:
        """One forward."""
        self._seat_waiting()
        batch = plan(self._slots, self._batch_tokens, singly=self._singly)
        if batch is None:
            return Step([], [])
        logits = self._policy.logits(batch)
        self._slots.cached[batch.fed] += batch.counts
        self.counts.forwards += 1
        self.counts.fed += batch.token_ids.size
        if not batch.sampling.size:
            return Step([], [])
        return self._record(batch.sampling, logits)

    def _seat_waiting(self) -> None:
        if not self.version:
            return
        for call, (request, shape, listened) in list(self._waiting.items()):
            if not self._slots.seat(call, request, shape, listened=listened):
                return
            del self._waiting[call]

    def _record(self, chosen: Index, logits: torch.Tensor) -> Step:
        """Samples the next token of each chosen slot and ends the calls that are done."""
        slots = self._slots
        shaped = self._drawn(chosen) if slots.shapes else ()
        token_ids, logprobs = sample(logits, slots.temperature[chosen], self._generator, shaped)
        take(shaped, token_ids)
        at = slots.known[chosen]
        slots.token_ids[chosen, at] = token_ids
        slots.logprobs[chosen, at] = logprobs
        slots.versions[chosen, at] = self.version
        slots.known[chosen] = at + 1
        self.counts.sampled += len(chosen)
        stopped = self._stops[token_ids]
        lost = ~np.isfinite(logprobs)
        ended = stopped | lost | (at + 1 >= slots.bound[chosen])
        pieces = self._pieces(chosen, lost, ended & ~stopped) if slots.listened else []
        return Step(
            [
                self._ended(int(chosen[i]), stopped=bool(stopped[i]), lost=bool(lost[i]))
                for i in np.flatnonzero(ended)
            ],
            pieces,
        )

    def _drawn(self, chosen: Index) -> list[Drawn]:
        """The rows of what is sampled now that more than a temperature shapes."""
        slots = self._slots
        return [
            Drawn(row, shape, slots.token_ids[slot, : slots.known[slot]], int(slots.prompt[slot]))
            for row, slot in enumerate(chosen.tolist())
            if (shape := slots.shapes.get(slot)) is not None
        ]

    def _pieces(
        self, chosen: Index, lost: NDArray[np.bool_], cut: NDArray[np.bool_]
    ) -> list[tuple[int, Generated]]:
        """The token that each slot sampled whose call is listened to; a lost one is no token."""
        slots = self._slots
        return [
            (int(slots.call[slot]), slots.last(slot, length=bool(cut[i])))
            for i, slot in enumerate(chosen.tolist())
            if slot in slots.listened and not lost[i]
        ]

    def _ended(
        self, slot: int, *, stopped: bool, lost: bool
    ) -> tuple[int, Generated | TreadleError]:
        call = int(self._slots.call[slot])
        if lost:
            last = int(self._slots.known[slot]) - 1
            shape = self._slots.shapes.get(slot)
            self._drop(slot)
            if shape is not None and shape.follower is not None and shape.broken:
                field, limit = shape.follower.field, "one that can be followed"
                return call, InvalidFieldError(field, limit=limit, value=shape.broken)
            self.counts.non_finite += 1
            return call, NonFiniteLogprobError(
                version=self.version,
                position=last,
                value=float(self._slots.logprobs[slot, last]),
            )
        made = self._slots.generated(slot, length=not stopped)
        self._slots.end(slot)
        return call, made

    def _drop(self, slot: int) -> None:
        """Ends a call whose keys no finite token vouches for, so none of them is kept."""
        self._slots.cached[slot] = 0
        self._slots.end(slot)
        self._policy.cache.clear(slot)
