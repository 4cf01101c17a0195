"""Policy of a worker: asks the replica over the socket for what its engine samples."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from treadle_agents.record import Generated
from treadle_gateway.frames import FrameError, Packer, Say
from treadle_gateway.ports import Prompt
from treadle_gateway.records import (
    PolicyError,
    error_from_list,
    generated_from_list,
    generated_joined,
    ids_to_bytes,
    sampling_to_map,
)

MOST_PIECES = 64
"""Pieces that are read at once where many have come."""

Heard = tuple[Say, list[Any]]


@dataclass(slots=True)
class PolicyLine:
    """As Policy, at the other end of the socket."""

    packer: Packer
    max_context: int
    _keys: "count[int]" = field(default_factory=count, init=False)
    _calls: "dict[int, asyncio.Queue[Heard]]" = field(
        default_factory=dict[int, "asyncio.Queue[Heard]"], init=False
    )

    async def generate(self, prompt: Prompt) -> AsyncGenerator[Generated]:
        """As Policy.generate."""
        key = next(self._keys)
        heard = self._calls[key] = asyncio.Queue[Heard]()
        over, failure = False, None
        try:
            self.packer.send(
                Say.GENERATE,
                key,
                prompt.session,
                ids_to_bytes(prompt.token_ids),
                sampling_to_map(prompt.sampling),
            )
            while True:
                pieces, over, failure = await _next(heard)
                if len(pieces) == 1:
                    yield generated_from_list(pieces[0])
                elif pieces:
                    yield generated_joined(pieces)
                if failure is not None:
                    raise failure
                if over:
                    return
        finally:
            del self._calls[key]
            if not over:
                self.packer.send(Say.STOP, key)

    def hear(self, say: Say, fields: list[Any]) -> None:
        """Takes a PIECE, DONE or FAILED; what concerns a call that was stopped is ignored."""
        if say not in (Say.PIECE, Say.DONE, Say.FAILED):
            raise FrameError(f"expected what the policy says, got {say.name}")
        call = self._calls.get(fields[0])
        if call is not None:
            call.put_nowait((say, fields[1:]))


async def _next(
    heard: "asyncio.Queue[Heard]",
) -> tuple[list[list[Any]], bool, PolicyError | None]:
    """What comes next with all that has: PIECEs, whether it is the end, and a bad one."""
    pieces: list[list[Any]] = []
    say, fields = await heard.get()
    while say is Say.PIECE:
        pieces.append(fields)
        if heard.empty() or len(pieces) == MOST_PIECES:
            return pieces, False, None
        say, fields = heard.get_nowait()
    return pieces, True, error_from_list(fields) if say is Say.FAILED else None
