"""A session to talk in: each token that is rendered or sampled is a number of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest

from treadle_agents.record import Generated
from treadle_core.tickets import Sampling
from treadle_gateway.capture.session import Capture, Place
from treadle_gateway.capture.turns import Turn
from treadle_gateway.conversation import Ask, Finish, Message, Text, ToolCall


def _ask(*messages: Message, **others) -> Ask:
    return Ask("policy", messages, **others)


@dataclass
class Talk:
    capture: Capture = field(default_factory=lambda: Capture(max_requests=1000))
    _tokens: "count[int]" = field(default_factory=count)

    def system(self, text: str) -> Message:
        return Message("system", (Text(text),))

    def user(self, text: str) -> Message:
        return Message("user", (Text(text),))

    def assistant(self, text: str = "", *call_ids: str, reasoning: str = "") -> Message:
        calls = tuple(ToolCall(name, "look", '{"b": 1.0, "a": "x"}') for name in call_ids)
        return Message("assistant", (Text(text),) if text else (), reasoning, calls)

    def result(self, call_id: str, text: str = "seen") -> Message:
        return Message("tool", (Text(text),), call_id=call_id)

    def locate(self, *messages: Message, **others) -> Place:
        return self.capture.locate(_ask(*messages, **others))

    def begin(self, place: Place, *, temperature: float = 1.0, trained: bool = True) -> Turn:
        """Renders each new message as two tokens, and one that asks the policy to speak."""
        ids = self.tokens(2 * len(place.new) + 1)
        sampling = Sampling(temperature=temperature)
        return self.capture.begin(place, ids, sampling=sampling, trained=trained, now=0.0)

    def start(self, *messages: Message, temperature: float = 1.0, trained: bool = True, **others):
        place = self.locate(*messages, **others)
        assert place.kind == "sample"
        return self.begin(place, temperature=temperature, trained=trained)

    def hear(self, turn: Turn, size: int, *, length: bool = False) -> None:
        ones = np.ones(size, np.int32)
        turn.heard(Generated(self.tokens(size), -ones.astype(np.float32), ones, ones, length))

    def end(self, turn: Turn, message: Message, finish: Finish = "stop", **others):
        return turn.finish(message, finish, id=f"{turn.number:x}", created=7, **others)

    def say(self, messages: Sequence[Message], reply: Message, *, deliver: bool = True, **others):
        """A whole turn of three sampled tokens."""
        turn = self.start(*messages, **others)
        self.hear(turn, 2)
        self.hear(turn, 1)
        self.end(turn, reply)
        if deliver:
            turn.delivered()
        return turn

    def tokens(self, size: int) -> np.ndarray:
        return np.asarray([next(self._tokens) for _ in range(size)], np.int32)


@pytest.fixture
def talk() -> Talk:
    return Talk()
