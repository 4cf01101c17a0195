"""Which request sits in which slot of the key-value cache, and what is known of its tokens.

Shapes: S = slots, C = max_context.
"""

import heapq

import numpy as np

from treadle_agents.record import Generated
from treadle_rollout.adapters.transformers_engine.shaping import Shape
from treadle_rollout.ports import GenerationRequest

_NONE = -1


class Slots:
    """The table of slots. A slot is free, idle (it keeps a session's keys) or running.

    A session's next request finds its idle slot again and recomputes only what differs from the
    tokens there. Requests of one session that overlap sit in slots of their own.
    """

    def __init__(self, count: int, max_context: int) -> None:
        self.token_ids = np.zeros((count, max_context), np.int64)
        """Prompt and sampled tokens, [S, C]."""
        self.logprobs = np.zeros((count, max_context), np.float32)
        """Of the sampled tokens, at their place, [S, C]."""
        self.versions = np.zeros((count, max_context), np.int32)
        """That sampled the tokens, at their place, [S, C]."""
        self.known = np.zeros(count, np.int64)
        """Tokens in `token_ids`, [S]."""
        self.cached = np.zeros(count, np.int64)
        """Leading tokens whose keys are in the cache, [S]; less than `known` while running."""
        self.bound = np.zeros(count, np.int64)
        """Known tokens at which the turn ends for its length, [S]."""
        self.temperature = np.zeros(count, np.float32)
        """Of the turn, [S]."""
        self.call = np.full(count, _NONE, np.int64)
        """The call that runs in the slot, [S]; -1 in none."""
        self.shapes: dict[int, Shape] = {}
        """What shapes the distribution of a running slot, beside temperature; of few or none."""
        self.listened: set[int] = set()
        """Running slots whose tokens are told as they come."""
        self.prompt = np.zeros(count, np.int64)
        """Tokens of the turn's prompt, [S]."""
        self._max_context = max_context
        self._slot_of: dict[int, int] = {}
        self._session: list[str | None] = [None] * count
        self._slots_of: dict[str, set[int]] = {}
        self._idle: dict[int, None] = {}
        self._free = list(range(count))

    @property
    def running(self) -> int:
        """Slots that run."""
        return len(self._slot_of)

    def seat(
        self,
        call: int,
        request: GenerationRequest,
        shape: Shape | None = None,
        *,
        listened: bool = False,
    ) -> bool:
        """Gives the request a slot; False if all run.

        An idle slot of its session comes first, then the lowest free one, then the one that has
        been idle longest.
        """
        slot = self._take(request.session)
        if slot is None:
            return False
        size = request.token_ids.size
        old = self.token_ids[slot, : min(int(self.cached[slot]), size - 1)]
        differs = np.flatnonzero(old != request.token_ids[: old.size])
        self.cached[slot] = differs[0] if differs.size else old.size
        self.token_ids[slot, :size] = request.token_ids
        self.known[slot] = self.prompt[slot] = size
        self.bound[slot] = min(size + request.sampling.max_tokens, self._max_context)
        self.temperature[slot] = request.sampling.temperature
        self.call[slot] = call
        self._slot_of[call] = slot
        if shape is not None:
            self.shapes[slot] = shape
        if listened:
            self.listened.add(slot)
        return True

    def slot_of(self, call: int) -> int | None:
        """The slot that the call runs in, if it does."""
        return self._slot_of.get(call)

    def end(self, slot: int) -> None:
        """Ends what runs in the slot: it turns idle, or free where the session was released."""
        del self._slot_of[int(self.call[slot])]
        self.call[slot] = _NONE
        self.shapes.pop(slot, None)
        self.listened.discard(slot)
        if self._session[slot] is None:
            self._vacate(slot)
        else:
            self._idle[slot] = None

    def generated(self, slot: int, *, length: bool) -> Generated:
        """What was sampled in the slot's turn, copied."""
        return self._copied(slot, int(self.prompt[slot]), length=length)

    def last(self, slot: int, *, length: bool) -> Generated:
        """The token that was sampled last, as a piece of the turn."""
        return self._copied(slot, int(self.known[slot]) - 1, length=length)

    def _copied(self, slot: int, start: int, *, length: bool) -> Generated:
        turn = slice(start, int(self.known[slot]))
        versions = self.versions[slot, turn].copy()
        return Generated(
            token_ids=self.token_ids[slot, turn].astype(np.int32),
            logprobs=self.logprobs[slot, turn].copy(),
            policy_version=versions,
            # No key outlives other weights, so the oldest version is the one that sampled.
            context_version=versions,
            length=length,
        )

    def release(self, session: str) -> None:
        """Forgets a session: its idle slots are free now, its running ones when they end."""
        for slot in self._slots_of.pop(session, ()):
            self._session[slot] = None
            if slot in self._idle:
                del self._idle[slot]
                self._vacate(slot)

    def _take(self, session: str) -> int | None:
        for slot in self._slots_of.get(session, ()):
            if slot in self._idle:
                del self._idle[slot]
                return slot
        if self._free:
            slot = heapq.heappop(self._free)
        elif self._idle:
            slot = next(iter(self._idle))
            del self._idle[slot]
            self._disown(slot)
        else:
            return None
        self._session[slot] = session
        self._slots_of.setdefault(session, set()).add(slot)
        return slot

    def _disown(self, slot: int) -> None:
        session = self._session[slot]
        if session is not None:
            self._slots_of[session].discard(slot)
            if not self._slots_of[session]:
                del self._slots_of[session]
        self.cached[slot] = 0

    def _vacate(self, slot: int) -> None:
        self.cached[slot] = 0
        heapq.heappush(self._free, slot)
