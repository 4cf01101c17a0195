"""One session: where each request goes on from, and what comes of all of them.

A request is matched to the longest conversation that it extends by meaning. Its tokens are those
that stand there, and what is new is rendered behind them once; nothing is tokenised again. What
matches nothing, or matches something that already goes on, begins a line of its own.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from treadle_core.episodes import Segment
from treadle_core.errors import InvalidFieldError
from treadle_core.media import MediumSpan
from treadle_core.tickets import Sampling
from treadle_gateway.capture.keys import head_of, wanted_of
from treadle_gateway.capture.labels import LABELS, Path, Paths
from treadle_gateway.capture.segments import OTHER_TEMPERATURE, Leaves
from treadle_gateway.capture.tree import Node, Tree
from treadle_gateway.capture.turns import Turn
from treadle_gateway.conversation import Ask, Message
from treadle_gateway.errors import RefusedError

OTHER_SAMPLING = "other_sampling"
"""Why a turn is not trained: it was not sampled as the recipe says."""
UNTRAINED = "asked"
"""Why a turn is not trained: its client marked it so."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs. To be begun before another request of the session is located."""

    kind: Literal["sample", "join", "replay"]
    """A turn is to be sampled; it is under way; its reply was made and not delivered."""
    turn: Turn | None
    """The one to join or to replay."""
    base: Turn | None
    """Its tokens stand, those of all turns that it goes on from included."""
    before: tuple[Message, ...]
    """Messages whose tokens are those of `base`, in the policy's own words where it wrote them."""
    new: tuple[Message, ...]
    """Those behind them, to be rendered; none where an open reply is simply gone on with."""
    head: bytes
    wanted: bytes
    node: Node
    onward: Turn | None
    path: Path
    cause: str
    """Why what is sampled here is not trained, by the request; empty where it says nothing."""

    @property
    def label(self) -> str:
        """What kind of conversation it belongs to."""
        return self.path.label

    @property
    def tokens(self) -> int:
        """How many stand."""
        return self.base.tokens if self.base else 0

    @property
    def closed(self) -> bool:
        """The last of them is a stop token."""
        return self.base is not None and self.base.closed

    def keep(self, count: int) -> "Place":
        """Lets the tokens of at most `count` messages stand, and renders the others as context.

        That is: goes on from an earlier turn, or from nothing, since tokens are never cut.
        """
        base = self.base
        while base and base.depth > count:
            base = base.base
        messages, depth = self.before + self.new, base.depth if base else 0
        return replace(self, base=base, before=messages[:depth], new=messages[depth:])


class Capture:
    """Records one session. Not for several threads."""

    def __init__(self, *, max_requests: int, trained: Collection[str] = LABELS) -> None:
        """More than `max_requests` are refused: some clients would ask for ever.

        `trained` are the labels whose turns are trained.
        """
        self._max_requests = max_requests
        self._tree = Tree()
        self._paths = Paths(frozenset(trained))
        self._turns: list[Turn] = []
        self._counts: Counter[str] = Counter()

    def locate(self, ask: Ask) -> Place:
        """Finds where a request belongs, in time proportional to its size.

        Raises RefusedError.
        """
        self._admit(ask)
        head, wanted = head_of(ask), wanted_of(ask)
        meanings = self._tree.meanings(ask.messages)
        walk = self._tree.walk(meanings, head)
        alike = walk.asked(head, wanted)
        for turn in (walk.same, walk.onward):
            if turn and turn.state == "finished":
                turn.delivered()  # it came back
        nodes = self._tree.lead(meanings, walk.same)
        messages = tuple(
            (node.said if node.replies else None) or message
            for node, message in zip(nodes, ask.messages, strict=True)
        )
        turn = next((turn for turn in reversed(alike) if _unseen(turn)), None)
        depth = walk.same.depth if walk.same else 0
        kind = "sample" if turn is None else "join" if turn.state == "running" else "replay"
        self._counts["joined"] += kind == "join"
        self._counts["replayed"] += kind == "replay"
        return Place(
            kind=kind,
            turn=turn,
            base=walk.same,
            before=messages[:depth],
            new=messages[depth:],
            head=head,
            wanted=wanted,
            node=nodes[-1],
            onward=walk.onward,
            path=self._path(ask, head, alike, walk.onward),
            cause=UNTRAINED if ask.identity.get("untrained") else "",
        )

    def begin(
        self,
        place: Place,
        new_ids: NDArray[np.int32],
        *,
        sampling: Sampling,
        trained: bool,
        now: float,
        media: Sequence[MediumSpan] = (),
    ) -> Turn:
        """Begins the turn that answers a request.

        `new_ids` close the turn before, are what `place.new` was rendered to, and have the policy
        speak; `media`: where images are in them. Not `trained`: the sampling is not the recipe's.
        `now` is in seconds, on any clock. Raises InvalidFieldError where there is no prompt at all.
        """
        if not new_ids.size and not place.base:
            raise InvalidFieldError("new_ids", limit=">= 1 tokens where none stand", value=0)
        turn = Turn(
            base=place.base,
            new_ids=np.asarray(new_ids, np.int32),
            sampling=sampling,
            depth=len(place.before) + len(place.new) + 1,
            head=place.head,
            wanted=place.wanted,
            number=len(self._turns),
            path=place.path,
            began=now,
            cause=place.cause or ("" if trained else OTHER_SAMPLING),
            told=partial(self._tree.say, place.node),
            media=tuple(media),
        )
        self._turns.append(turn)
        self._paths.begin(place.path)
        place.node.asked.append(turn)
        if place.onward:
            place.onward.followed(turn)
        return turn

    def segments(self, *, trainable: bool) -> tuple[Segment, ...]:
        """One for each line of turns, in the order of their creation.

        An action is trained in the first line that ends with a trained turn, and is context in the
        others. Nothing is trained unless `trainable`.
        """
        return Leaves(self._turns).segments(trainable=trainable)

    @property
    def counts(self) -> Mapping[str, int]:
        """What happened.

        `requests`, `joined`, `replayed`, `turns`, `branches` (lines beyond the first); by label
        `turns.*`, and `paths.*` that began so; by cause `untrained.*` turns.
        """
        leaves = Leaves(self._turns)
        counts = self._counts + Counter(turns=len(self._turns))
        bases = Counter(turn.base for turn in self._turns)
        counts["branches"] = sum(others - 1 for others in bases.values())
        counts.update(f"turns.{turn.label}" for turn in self._turns)
        counts.update(f"paths.{path.label}" for path in self._paths.begun)
        for turn in self._turns:
            cause = turn.untrained or ("" if turn in leaves.home else OTHER_TEMPERATURE)
            if cause:
                counts[f"untrained.{cause}"] += 1
        return counts

    def forget(self) -> None:
        """Lets go of all that was said, so that none of it waits for a collector of garbage."""
        self._tree.forget()
        for turn in self._turns:
            turn.forget()
        self._turns.clear()

    def _admit(self, ask: Ask) -> None:
        self._counts["requests"] += 1
        if self._counts["requests"] > self._max_requests:
            # Not `busy`: a client that may come again would.
            message = f"max_requests: this session is over its limit of {self._max_requests}"
            raise RefusedError("invalid", message, code="max_requests", limit=self._max_requests)
        if not ask.messages:
            raise RefusedError("invalid", "messages: expected at least one", field="messages")
        named: set[str] | None = None
        for index, message in enumerate(ask.messages):
            if message.role != "tool" or message.call_id in self._tree.issued:
                continue
            if not message.call_id:
                continue  # an agent that reads calls out of the text has no ids for them
            if named is None:
                named = {call.id for message in ask.messages for call in message.calls}
            if message.call_id not in named:
                raise RefusedError(
                    "invalid",
                    f"messages[{index}]: no call {message.call_id[:200]!r} is known",
                    field=f"messages[{index}]",
                    code="unknown_call",
                )

    def _path(self, ask: Ask, head: bytes, alike: list[Turn], onward: Turn | None) -> Path:
        if alike:
            return self._paths.again(ask, alike[-1].path)
        if onward:
            return self._paths.onward(ask, onward.path, taken=onward.taken)
        return self._paths.opened(ask, head)


def _unseen(turn: Turn) -> bool:
    """Whether a request that asks again is answered with it."""
    return turn.state in ("running", "finished")
