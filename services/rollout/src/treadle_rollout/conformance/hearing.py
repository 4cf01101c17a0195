"""The promises about turns that are heard while they are sampled."""

import asyncio
from dataclasses import dataclass, field

import numpy as np

from treadle_agents.record import Generated
from treadle_rollout.conformance.subject import (
    Check,
    Subject,
    check_turn,
    install,
    prompt,
    request,
    require,
    serving,
)


@dataclass(slots=True)
class _Ear:
    """Keeps what it is told."""

    pieces: list[Generated] = field(default_factory=list[Generated])
    told: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, piece: Generated) -> None:
        self.pieces.append(piece)
        self.told.set()

    def check(self, whole: Generated) -> None:
        """The pieces are together what was returned, array by array and bit by bit."""
        require(all(piece.token_ids.size for piece in self.pieces), "a piece has a token")
        for name in ("token_ids", "logprobs", "policy_version", "context_version"):
            joined = np.concatenate([getattr(piece, name) for piece in self.pieces])
            require(np.array_equal(joined, getattr(whole, name)), f"pieces are the whole in {name}")
        ends = [piece.length for piece in self.pieces]
        require(not any(ends[:-1]) and ends[-1] is whole.length, "the last piece says `length`")


async def what_is_heard_is_what_is_returned(subject: Subject) -> None:
    """Heard and unheard calls together, with more calls than slots and stops amid them."""
    stops = (1, 3)
    async with serving(subject, slots=3, max_context=48, stop_tokens=stops) as engine:
        ears = [_Ear() for _ in range(8)]
        whole = await asyncio.gather(
            *(
                engine.generate(
                    request(f"s{i}", prompt(subject, 3 + i % 4, seed=i), 3 + 5 * (i % 3)),
                    None if i % 4 == 3 else ear,
                )
                for i, ear in enumerate(ears)
            )
        )
        for i, (ear, turn) in enumerate(zip(ears, whole, strict=True)):
            if i % 4 == 3:
                require(not ear.pieces, "nobody is told who did not ask")
            else:
                ear.check(turn)
        require(len({turn.length for turn in whole}) == 2, "turns of both kinds were heard")


async def a_turn_is_heard_while_it_is_sampled(subject: Subject) -> None:
    """Its first piece comes before its last token; versions that come amid it are told."""
    async with serving(subject, slots=2, max_context=2048) as engine:
        ear, ids = _Ear(), prompt(subject, 5)
        call = asyncio.create_task(engine.generate(request("a", ids, 200), ear))
        await ear.told.wait()
        require(not call.done(), "a piece is told before the turn ends")
        early = len(ear.pieces)
        await install(engine, subject, 2)
        turn = await call
    ear.check(turn)
    require(len(ear.pieces) > early, "what is sampled later is told later")
    versions = np.unique(turn.policy_version).tolist()
    require(versions == [1, 2], f"tokens of both versions were heard, not {versions}")
    check_turn(subject, ids, turn, 1.0)


async def a_cancelled_call_is_heard_no_more(subject: Subject) -> None:
    """And the next call gets its slot."""
    async with serving(subject, slots=1, max_context=2048) as engine:
        ear = _Ear()
        call = asyncio.create_task(
            engine.generate(request("a", prompt(subject, 3), max_tokens=2040), ear)
        )
        await ear.told.wait()
        call.cancel()
        await asyncio.wait([call])
        require(call.cancelled(), "a cancelled call ends as cancelled")
        heard = len(ear.pieces)
        ids, next_ear = prompt(subject, 4), _Ear()
        turn = await engine.generate(request("b", ids, max_tokens=5), next_ear)
        next_ear.check(turn)
        check_turn(subject, ids, turn, 1.0)
        require(len(ear.pieces) == heard, "a cancelled call is told nothing more")


CHECKS: tuple[Check, ...] = (
    what_is_heard_is_what_is_returned,
    a_turn_is_heard_while_it_is_sampled,
    a_cancelled_call_is_heard_no_more,
)
