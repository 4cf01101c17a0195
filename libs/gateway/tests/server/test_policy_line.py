"""A policy line from end to end: what a worker asks for, and what it hears of the engine."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pytest

from treadle_agents.record import Generated
from treadle_core.errors import TreadleError
from treadle_core.tickets import Sampling
from treadle_gateway.frames import FRAMING, Say
from treadle_gateway.policy_calls import Heard, PolicyCalls
from treadle_gateway.policy_line import PolicyLine
from treadle_gateway.ports import Asked, Prompt
from treadle_gateway.testing import PATIENCE_S
from treadle_runtime.workers.framing import FrameError

LONG_S = 600.0
SAMPLING = Sampling(temperature=1.0, max_tokens=9)


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def piece(*tokens: int) -> Generated:
    ones = np.ones(len(tokens), np.int32)
    return Generated(ids(*tokens), -ones.astype(np.float32), ones, ones, length=False)


@dataclass
class Ear:
    """A listener."""

    pieces: list[list[int]] = field(default_factory=list[list[int]])
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    error: TreadleError | None = None

    def heard(self, piece: Generated) -> None:
        self.pieces.append(piece.token_ids.tolist())
        self.news.set()

    def ended(self, error: TreadleError | None) -> None:
        self.error = error
        self.over.set()


class Engine:
    """Says a token a piece, then waits until it may end."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.prompts: list[list[int]] = []
        self.said, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def generate(self, prompt: Prompt, heard: Heard) -> None:
        self.prompts.append(prompt.token_ids.tolist())
        for token in self.tokens:
            heard(piece(token))
        self.said.set()
        await self.go_on.wait()


class End(asyncio.Protocol):
    """One end of a line; what comes in is given to `hear`."""

    hear: Callable[[Say, list[Any]], None]

    def __init__(self) -> None:
        self._unpacker = FRAMING.unpacker()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.packer = FRAMING.packer(self.transport)

    def data_received(self, data: bytes) -> None:
        for say, fields in self._unpacker.feed(data):
            self.hear(say, fields)


@asynccontextmanager
async def line_to(engine: Engine) -> AsyncIterator[PolicyLine]:
    loop = asyncio.get_running_loop()
    ends = [await loop.create_connection(End, sock=sock) for sock in socket.socketpair()]
    ours, theirs = (end for _, end in ends)
    calls = PolicyCalls(engine.generate, theirs.packer)
    theirs.hear = lambda say, fields: (
        calls.begin(*fields) if say is Say.GENERATE else calls.stop(*fields)
    )
    line = PolicyLine(ours.packer, 100)
    ours.hear = line.hear
    yield line
    calls.close()
    for transport, _ in ends:
        transport.close()


def asked(stands: int, *tokens: int, apart_s: float = 0.0, session: str = "one") -> Asked:
    return Asked(session, stands, ids(*tokens), SAMPLING, apart_s)


async def test_of_a_prompt_only_what_is_new_is_sent() -> None:
    engine = Engine(7)
    async with line_to(engine) as line:
        for each in (
            asked(0, 1, 2, 3),
            asked(2, 8, 9),
            asked(4),
            asked(0, 5, session="two"),
            asked(3, 6),
        ):
            ear = Ear()
            line.begin(each, ear)
            await ear.over.wait()
    assert engine.prompts == [[1, 2, 3], [1, 2, 8, 9], [1, 2, 8, 9], [5], [1, 2, 8, 6]]


async def test_more_than_is_known_cannot_stand() -> None:
    async with line_to(Engine(7)) as line:
        calls = PolicyCalls(Engine(7).generate, line.packer)
        with pytest.raises(FrameError, match="at most 0 tokens"):
            calls.begin(0, "one", 1, b"", {"temperature": 1.0}, 0.0, [])


@pytest.mark.parametrize(("apart_s", "pieces"), [(0.0, [[4], [5], [6]]), (LONG_S, [[4, 5, 6]])])
async def test_pieces_that_come_too_soon_go_as_one(apart_s: float, pieces: list[list[int]]) -> None:
    async with line_to(Engine(4, 5, 6)) as line:
        ear = Ear()
        line.begin(asked(0, 1, apart_s=apart_s), ear)
        await ear.over.wait()
    assert ear.pieces == pieces
    assert ear.error is None


async def test_what_is_held_is_said_when_it_is_due_though_nothing_follows() -> None:
    engine = Engine(4, 5, 6)
    engine.go_on.clear()
    async with line_to(engine) as line:
        ear = Ear()
        line.begin(asked(0, 1, apart_s=0.01), ear)
        async with asyncio.timeout(PATIENCE_S):
            while [token for each in ear.pieces for token in each] != [4, 5, 6]:
                await ear.news.wait()
                ear.news.clear()
        assert not ear.over.is_set()


async def test_what_was_sampled_before_it_was_stopped_is_heard() -> None:
    engine = Engine(4, 5)
    engine.go_on.clear()
    async with line_to(engine) as line:
        ear = Ear()
        stop = line.begin(asked(0, 1, apart_s=LONG_S), ear)
        await engine.said.wait()
        assert ear.pieces == []
        stop()
        await ear.over.wait()
    assert ear.pieces == [[4, 5]]


async def test_who_stops_before_the_engine_began_hears_that_it_ended() -> None:
    async with line_to(Engine(4)) as line:
        ear = Ear()
        line.begin(asked(0, 1), ear)()
        await ear.over.wait()
    assert ear.pieces == []
