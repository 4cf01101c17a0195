"""Engine `scripted`: a policy that is a table, and a script that may put words into its mouth.

No model and no torch: it starts at once and samples the same for the same episode, which is what
trying agents, and testing all around an engine, needs. It keeps every promise of the port.

Shapes: V = vocabulary, N = sampled tokens.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError
from treadle_rollout.core.errors import (
    EngineClosedError,
    EngineFaultError,
    NonFiniteLogprobError,
)
from treadle_rollout.core.requests import check_request
from treadle_rollout.ports import GenerationRequest
from treadle_weights.layouts import Layout, whole

Script = Callable[[str, int], Sequence[int]]
"""What a session says after a prompt of so many tokens; the stop token is part of it."""


@dataclass(slots=True)
class ScriptedEngine:
    """Engine plugin `scripted`. Its fields are its configuration.

    The weights are one float32 [V, V]: the logits of a token by the token before it. Chance is a
    function of the seed, the episode (or the session, where there is none) and the place in it, so
    that every attempt at an episode says the same under the same weights.
    """

    model: Path | str = ""
    """Ignored: there is none."""
    max_context: int = 1024
    slots: int = 64
    """Calls that sample at once; more wait, first come, first served."""
    seed: int = 0
    vocabulary: int = 64
    stop_tokens: tuple[int, ...] = (1,)
    """Tokens that end a turn."""
    token_s: float = 0.0
    """Seconds that a token takes."""
    weightless: bool = False
    """Takes no weights, whatever is published: every token is as likely as any other."""
    script: Script | None = None
    """Takes the place of chance."""
    fail_every: int = 0
    """Fault on demand: every so many calls one fails with ENGINE_FAULT; 0 for none."""
    non_finite_at: int = 0
    """Fault on demand: the call, from 1, whose first token gets no log-probability; 0 for none."""
    hang_at: int = 0
    """Fault on demand: the call, from 1, that ends only when it is cancelled; 0 for none."""
    non_finite: int = field(default=0, init=False)
    layout: Layout = field(init=False)
    arrival: NDArray[np.uint8] = field(init=False)
    served_version: int = field(default=0, init=False)
    _table: NDArray[np.float32] = field(init=False)
    _places: asyncio.Semaphore = field(init=False)
    _serving: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _calls: "set[asyncio.Task[object]]" = field(
        default_factory=set["asyncio.Task[object]"], init=False
    )
    _closed: bool = field(default=False, init=False)
    _num_calls: int = field(default=0, init=False)
    _sessions: set[str] = field(default_factory=set[str], init=False)

    def __post_init__(self) -> None:
        """Zero weights until the first install: every token is as likely as any other."""
        shape = (self.vocabulary, self.vocabulary)
        self.layout = whole({} if self.weightless else {"bigrams": ("float32", shape)})
        self.arrival = np.zeros(self.layout.size(), np.uint8)
        self._table = np.zeros(shape, np.float32)
        self._places = asyncio.Semaphore(self.slots)

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return frozenset(self.stop_tokens)

    @property
    def sessions(self) -> frozenset[str]:
        """Sessions that were not released."""
        return frozenset(self._sessions)

    async def generate(self, request: GenerationRequest) -> Generated:
        if self._closed:
            raise EngineClosedError
        check_request(request, vocabulary=self.vocabulary, max_context=self.max_context)
        self._sessions.add(request.session)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101, a coroutine runs in one
        self._calls.add(task)
        try:
            await self._fault(request)
            return await self._generate(request)
        except NonFiniteLogprobError:
            self.non_finite += 1
            raise
        except asyncio.CancelledError:
            if not self._closed or task.uncancel():
                raise
            raise EngineClosedError from None
        finally:
            self._calls.discard(task)

    def release(self, session: str) -> None:
        self._sessions.discard(session)

    async def install(self, version: int) -> None:
        if self._closed:
            raise EngineClosedError
        if version < self.served_version:
            limit = f">= {self.served_version}"
            raise InvalidFieldError("version", limit=limit, value=version)
        if version > self.served_version:
            if not self.weightless:
                self._table = self.arrival.view(np.float32).reshape(self._table.shape).copy()
            self.served_version = version
            self._serving.set()

    async def alias(self, version: int) -> None:
        if self._closed:
            raise EngineClosedError
        served = self.served_version
        if not 0 < served <= version:
            raise InvalidFieldError("version", limit=f">= {served} > 0", value=version)
        self.served_version = version

    async def close(self) -> None:
        self._closed = True
        for task in self._calls:
            task.cancel()

    async def _fault(self, request: GenerationRequest) -> None:
        """What was demanded of this call, counted in the order in which calls come."""
        self._num_calls += 1
        call = self._num_calls
        if call == self.hang_at:
            await asyncio.Event().wait()
        if self.fail_every and call % self.fail_every == 0:
            raise EngineFaultError(call)
        if call == self.non_finite_at:
            size = request.token_ids.size
            raise NonFiniteLogprobError(
                version=self.served_version, position=size, value=float("nan")
            )

    async def _generate(self, request: GenerationRequest) -> Generated:
        size = min(request.sampling.max_tokens, self.max_context - request.token_ids.size)
        script = self.script and self.script(request.session, request.token_ids.size)
        tokens = [int(request.token_ids[-1])]
        logprobs: list[float] = []
        versions: list[int] = []
        await self._serving.wait()
        async with self._places:
            for number in range(len(script[:size]) if script else size):
                await asyncio.sleep(self.token_s)
                place = request.token_ids.size + number
                said = script[number] if script else None
                token, logprob = self._sample(request, tokens[-1], place, said)
                tokens.append(token)
                logprobs.append(logprob)
                versions.append(self.served_version)
                if token in self.stop_tokens:
                    break
        stopped = tokens[-1] in self.stop_tokens
        return Generated(
            token_ids=np.array(tokens[1:], np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy_version=np.array(versions, np.int32),
            context_version=np.array(versions, np.int32),
            length=not stopped,
        )

    def _sample(
        self, request: GenerationRequest, before: int, place: int, said: int | None
    ) -> tuple[int, float]:
        """The next token and its log-probability; greedy ones at temperature 1."""
        temperature = request.sampling.temperature
        logits = self._table[before].astype(np.float64) / (temperature or 1.0)
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        if said is not None:
            token = said
        elif temperature == 0:
            token = int(logprobs.argmax())
        else:
            key = f"{self.seed}/{request.episode or request.session}/{place}".encode()
            chance = int.from_bytes(hashlib.sha256(key).digest()[:6], "big") / 2**48
            below = int((np.exp(logprobs).cumsum() <= chance).sum())
            token = min(below, self.vocabulary - 1)
        if not np.isfinite(logprobs[token]):
            value = float(logprobs[token])
            raise NonFiniteLogprobError(version=self.served_version, position=place, value=value)
        return token, float(logprobs[token])
