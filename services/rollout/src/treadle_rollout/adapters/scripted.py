"""Engine `scripted`: a policy that is a table, or that says what a script answers.

No model and no torch: it starts at once and samples the same for the same episode, which is what
trying agents, and testing all around an engine, needs. It keeps every promise of the port.

Shapes: V = vocabulary, N = sampled tokens.
"""

import asyncio
import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from treadle_agents.images.placeholders import ImageRule
from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import CONSTRAINTS, SHAPES, Sampling
from treadle_rollout.adapters.script import Script, Speaker
from treadle_rollout.core.errors import (
    EngineClosedError,
    EngineFaultError,
    NonFiniteLogprobError,
)
from treadle_rollout.core.requests import check_request
from treadle_rollout.core.shaping import logprobs_of
from treadle_rollout.ports import GenerationRequest, Heard
from treadle_rollout.words import raw
from treadle_weights.layouts import Layout, whole

_VOCABULARY = 64


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
    vocabulary: int = 0
    """Token ids are below this; 0: as many as the tokenizer has, 64 where there is none."""
    stop_tokens: tuple[int | str, ...] = (1,)
    """Tokens that end a turn, by id, or by name where there is a tokenizer."""
    token_s: float = 0.0
    """Seconds that a token takes."""
    weightless: bool = False
    """Takes no weights, whatever is published: every token is as likely as any other."""
    script: Script | str | None = None
    """Takes the place of chance: a function, or where one is: `module:name`, `file.py:name`."""
    image_tokens: int = 0
    """Tokens that it takes every image for; 0: it reads no images, unless `image_patch` says so."""
    image_patch: int = 0
    """Pixels along a side of the square of an image that it takes a token for; 0: none."""
    fail_every: int = 0
    """Fault on demand: every so many calls one fails with ENGINE_FAULT; 0 for none."""
    non_finite_at: int = 0
    """Fault on demand: the call, from 1, whose first token gets no log-probability; 0 for none."""
    hang_at: int = 0
    """Fault on demand: the call, from 1, that ends only when it is cancelled; 0 for none."""
    non_finite: int = field(default=0, init=False)
    images: ImageRule | None = field(default=None, init=False)
    layout: Layout = field(init=False)
    arrival: NDArray[np.uint8] = field(init=False)
    served_version: int = field(default=0, init=False)
    stop_token_ids: frozenset[int] = field(init=False)
    _table: NDArray[np.float32] = field(init=False)
    _speaker: Speaker | None = field(default=None, init=False)
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
        file = Path(self.model) / "tokenizer.json"
        words = raw(str(file)) if self.model and file.is_file() else None
        self.vocabulary = self.vocabulary or (words.get_vocab_size() if words else _VOCABULARY)
        self.stop_token_ids = frozenset(_id(token, words) for token in self.stop_tokens)
        if self.script is not None:
            self._speaker = Speaker(self.script, words, vocabulary=self.vocabulary)
        if self.image_tokens or self.image_patch:
            self.images = ImageRule(self.image_tokens, self.image_patch or 1, least=1)
        size = self.vocabulary
        self.layout = whole({} if self.weightless else {"bigrams": ("float32", (size, size))})
        self.arrival = np.zeros(self.layout.size(), np.uint8)
        self._table = np.zeros((1 if self.weightless else size, size), np.float32)
        self._places = asyncio.Semaphore(self.slots)

    @property
    def samplings(self) -> frozenset[str]:
        """All but constraints; a script says what it says, whatever is asked."""
        return SHAPES - CONSTRAINTS

    @property
    def sessions(self) -> frozenset[str]:
        """Sessions that were not released."""
        return frozenset(self._sessions)

    async def generate(self, request: GenerationRequest, heard: Heard | None = None) -> Generated:
        if self._closed:
            raise EngineClosedError
        check_request(
            request,
            vocabulary=self.vocabulary,
            max_context=self.max_context,
            samplings=self.samplings,
            images=self.images,
        )
        self._sessions.add(request.session)
        task = asyncio.current_task()
        assert task is not None  # noqa: S101, a coroutine runs in one
        self._calls.add(task)
        try:
            await self._fault(request)
            return await self._generate(request, heard)
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

    async def _generate(self, request: GenerationRequest, heard: Heard | None) -> Generated:
        turn = _Turn(self.stop_token_ids)
        size = min(request.sampling.max_tokens, self.max_context - request.token_ids.size)
        await self._serving.wait()
        async with self._places:
            script = None if self._speaker is None else self._speaker.answer(request)[:size]
            for number in range(size if script is None else len(script)):
                await asyncio.sleep(self.token_s)
                said = None if script is None else script[number]
                turn.add(*self._sample(request, turn.token_ids, said), self.served_version)
                if heard:
                    last = number + 1 == size or (script is not None and number + 1 == len(script))
                    heard(turn.piece(number, last=last))
                if turn.stopped:
                    break
        return turn.piece(0, last=True)

    def _sample(
        self, request: GenerationRequest, turn: list[int], said: int | None
    ) -> tuple[int, float]:
        """The token behind a turn so far, and its log-probability; greedy ones at temperature 1."""
        if said is not None and self.weightless:
            return said, -math.log(self.vocabulary)
        sampling, prompt = request.sampling, request.token_ids
        before = 0 if self.weightless else turn[-1] if turn else int(prompt[-1])
        logits = self._table[before].astype(np.float64)
        if said is not None:
            sampling = Sampling(sampling.temperature)
        logprobs = logprobs_of(logits, sampling, prompt, turn)
        place = prompt.size + len(turn)
        if said is not None:
            token = said
        elif sampling.temperature == 0:
            token = int(logprobs.argmax())
        else:
            token = _drawn(logprobs, self._chance(request, place))
        if not np.isfinite(logprobs[token]):
            value = float(logprobs[token])
            raise NonFiniteLogprobError(version=self.served_version, position=place, value=value)
        return token, float(logprobs[token])

    def _chance(self, request: GenerationRequest, place: int) -> float:
        """In [0, 1)."""
        own = request.sampling.seed
        whose = request.episode or request.session
        key = f"{self.seed}/{whose}/{place}" if own is None else f"{own}//{place}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:6], "big") / 2**48


@dataclass(slots=True)
class _Turn:
    """What was sampled so far."""

    stops: frozenset[int]
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])

    @property
    def stopped(self) -> bool:
        return self.token_ids[-1] in self.stops

    def add(self, token: int, logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def piece(self, start: int, *, last: bool) -> Generated:
        versions = np.array(self.versions[start:], np.int32)
        return Generated(
            token_ids=np.array(self.token_ids[start:], np.int32),
            logprobs=np.array(self.logprobs[start:], np.float32),
            policy_version=versions,
            context_version=versions,
            length=last and not self.stopped,
        )


def _drawn(logprobs: NDArray[np.float64], chance: float) -> int:
    """The token that stands where `chance` falls, of those that can be sampled."""
    cumulated = np.exp(logprobs).cumsum()
    if not np.isfinite(cumulated[-1]):
        return 0
    below = int((cumulated <= chance * cumulated[-1]).sum())
    return min(below, int(np.flatnonzero(np.isfinite(logprobs))[-1]))


def _id(token: int | str, words: Tokenizer | None) -> int:
    found = token if isinstance(token, int) else words.token_to_id(token) if words else None
    if found is None:
        limit = "ids, or tokens of the tokenizer in the model's folder"
        raise InvalidFieldError("engine.stop_tokens", limit=limit, value=token)
    return found
