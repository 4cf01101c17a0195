"""The engine as the replica sees it: coroutines on one side, a decoding thread on the other.

The thread takes orders between two forwards and answers all calls that ended in a forward with
one wake-up of the event loop.
"""

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_core.tickets import CONSTRAINTS, SHAPES, Sampling
from treadle_rollout.adapters.transformers_engine.acceptance import accept
from treadle_rollout.adapters.transformers_engine.decoder import Counts, Decoder
from treadle_rollout.adapters.transformers_engine.grammar import Grammars
from treadle_rollout.adapters.transformers_engine.policy import Policy
from treadle_rollout.adapters.transformers_engine.shaping import Shape
from treadle_rollout.adapters.transformers_engine.stops import stop_token_ids
from treadle_rollout.core.errors import (
    EngineBrokenError,
    EngineClosedError,
)
from treadle_rollout.core.requests import check_request
from treadle_rollout.ports import GenerationRequest, Heard
from treadle_weights.layouts import Layout

_BATCH_TOKENS = 2048
"""Most tokens of one forward: bounds its memory, and how long a prompt holds up the others."""

_MASK_CELLS = 2**23
"""Bounds tokens * context of one forward, the size of its attention masks."""

_SINGLY = 32
"""With graphs a step of single tokens costs a small part of any other, so that a reply or a short
prompt is fed token by token where it would hold up a majority."""

_logger = logging.getLogger(__name__)


_Answer: TypeAlias = "tuple[asyncio.Future[Any], object]"
_Piece: TypeAlias = tuple[int, Generated]
_Order: TypeAlias = "Callable[[], None] | None"
"""What the thread does next; None: it ends."""


class TransformersEngine:
    """Engine `transformers`: decodes a Hugging Face model in this process, many calls at once.

    Greedy calls (temperature 0) report the log-probability at temperature 1; see `sampling`. It
    honours every field of `Sampling`, but `schema` and `grammar` only with llguidance.

    Args:
        model: Hugging Face model folder.
        max_context: most tokens of prompt and generation together.
        slots: calls that run at once and sessions whose keys are kept; further calls wait their
            turn, first come, first served, and take the slot that has been idle longest.
        dtype: of parameters, keys and arithmetic: float32, bfloat16 or float16.
        device: torch device.
        seed: of the sampling.
        stop_tokens: tokens or ids that end a turn; by default those that the folder declares.
        threads: of torch on the CPU, for the whole process.
        cuda_graphs: replay steps that feed one token a slot as CUDA graphs; on a GPU alone.

    Raises:
        InvalidFieldError: an argument is outside its limits.
        UnsupportedModelError: the model cannot be served.
    """

    def __init__(
        self,
        model: Path | str,
        max_context: int,
        slots: int,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        seed: int = 0,
        stop_tokens: Sequence[str | int] | None = None,
        threads: int = 1,
        cuda_graphs: bool = True,
    ) -> None:
        if slots < 1:
            raise InvalidFieldError("engine.slots", limit=">= 1", value=slots)
        torch.set_num_threads(threads)
        folder = Path(model)
        with torch.inference_mode():
            policy = Policy(
                folder, dtype=dtype, device=device, slots=slots, max_context=max_context
            )
            graphs = cuda_graphs and policy.device.type == "cuda"
            accept(policy, slots=slots, max_context=max_context, graphs=graphs)
        self._policy = policy
        self._max_context = max_context
        self._stops = stop_token_ids(folder, stop_tokens, vocabulary=policy.vocabulary)
        self._decoder = Decoder(
            policy,
            slots=slots,
            max_context=max_context,
            stop_ids=self._stops,
            batch_tokens=max(64, min(_BATCH_TOKENS, _MASK_CELLS // max_context)),
            singly=_SINGLY if graphs else 1,
            seed=seed,
        )
        self._grammars = Grammars(folder, self._stops, policy.vocabulary)
        self._samplings = SHAPES if self._grammars.available else SHAPES - CONSTRAINTS
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._numbers = itertools.count()
        # By the number of what was asked, until it is answered.
        self._open: dict[int, asyncio.Future[Any]] = {}
        # By the number of a call that is listened to, until it ends.
        self._heard: dict[int, tuple[asyncio.AbstractEventLoop, Heard]] = {}
        # Guards the hand-over at the thread's end: what is asked is answered by it, or refused.
        self._gate = threading.Lock()
        self._ended: Callable[[], TreadleError] | None = None
        self._thread = threading.Thread(target=self._decode, name="decode", daemon=True)
        self._thread.start()

    @property
    def served_version(self) -> int:
        """Version installed now; 0 before the first install, until which calls wait."""
        return self._decoder.version

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and generation together."""
        return self._max_context

    @property
    def non_finite(self) -> int:
        """Calls that failed because a token had no finite log-probability."""
        return self._decoder.counts.non_finite

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """Tokens that end a turn."""
        return self._stops

    @property
    def images(self) -> None:
        """It reads none."""

    @property
    def samplings(self) -> frozenset[str]:
        """Optional fields of `Sampling` that it honours."""
        return self._samplings

    @property
    def layout(self) -> Layout:
        """The named parameters, tied ones once, in the model's order."""
        return self._policy.layout

    @property
    def arrival(self) -> NDArray[np.uint8]:
        """Buffer that the next version's bytes are written into, [bytes]."""
        return self._policy.arrival

    @property
    def counts(self) -> Counts:
        """What was done so far; rises while it is read."""
        return self._decoder.counts

    async def generate(self, request: GenerationRequest, heard: Heard | None = None) -> Generated:
        """Samples one turn. Cancelling the call frees its place at the next token.

        `heard` is told of every token after the forward that sampled it.

        Raises:
            InvalidFieldError: a field of the request is outside its limits.
            ContextOverflowError: the prompt leaves no room for a token.
            NonFiniteLogprobError: a sampled token has no finite log-probability.
            EngineClosedError: the engine is or was closed.
            EngineBrokenError: decoding ended by an unexpected error.
        """
        check_request(
            request,
            vocabulary=self._policy.vocabulary,
            max_context=self._max_context,
            samplings=self._samplings,
        )
        shape = await self._shape(request.sampling) if request.sampling.shaped else None
        call = next(self._numbers)
        if heard is not None:
            self._heard[call] = asyncio.get_running_loop(), heard
        submit = partial(self._decoder.submit, call, request, shape, listened=heard is not None)
        try:
            return await self._ask(call, submit)
        except asyncio.CancelledError:
            self._tell(partial(self._cancel, call))
            raise
        finally:
            self._heard.pop(call, None)

    async def _shape(self, sampling: Sampling) -> Shape:
        return Shape(sampling, await self._grammars.follower(sampling))

    def release(self, session: str) -> None:
        """Forgets what is cached for a session; unknown sessions are ignored."""
        self._tell(partial(self._decoder.release, session))

    async def install(self, version: int) -> None:
        """Makes the bytes in `arrival` the served version, wholly, between two tokens.

        Installing the served version again changes nothing. Once called, the install happens;
        a cancelled call still waits for it, since the buffer must not change under it.

        Raises:
            InvalidFieldError: the version is older than the served one.
            EngineClosedError, EngineBrokenError: as `generate`.
        """
        if version < max(self.served_version, 1):
            raise InvalidFieldError("version", limit=f">= {self.served_version}", value=version)
        await self._swap(self._decoder.install, version)

    async def alias(self, version: int) -> None:
        """Serves on under another number: the weights of `version` are those served, bit for bit.

        Raises:
            InvalidFieldError: nothing is served, or a newer version.
            EngineClosedError, EngineBrokenError: as `generate`.
        """
        served = self.served_version
        if not 0 < served <= version:
            raise InvalidFieldError("version", limit=f">= {served} > 0", value=version)
        await self._swap(self._decoder.alias, version)

    async def close(self) -> None:
        """Fails what runs with EngineClosedError and ends the thread; may be called again."""
        self._tell(None)
        await asyncio.to_thread(self._thread.join)

    async def _swap(self, swap: Callable[[int], None], version: int) -> None:
        number = next(self._numbers)
        future = self._ask(number, partial(self._serve, number, swap, version))
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    def _ask(self, number: int, order: _Order) -> "asyncio.Future[Any]":
        """Sends an order that is answered under its number. Raises what ended the thread."""
        future = asyncio.get_running_loop().create_future()
        with self._gate:
            if self._ended is not None:
                raise self._ended()
            self._open[number] = future
            self._orders.put(order)
        return future

    def _tell(self, order: _Order) -> None:
        """Sends an order that nobody waits for; a thread that has ended needs none."""
        self._orders.put(order)

    def _decode(self) -> None:
        """The thread: orders, one step, answers; until closed or broken."""
        ended: Callable[[], TreadleError] = EngineClosedError
        try:
            with torch.inference_mode():
                while self._take_orders():
                    step = self._decoder.step()
                    self._answer(step.ended, step.pieces)
        except Exception as error:
            _logger.exception("decoding ended")
            ended = partial(EngineBrokenError, error)
        self._end(ended)

    def _take_orders(self) -> bool:
        """Carries out what was ordered; waits for an order where a step would do nothing."""
        while self._decoder.idle or not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return False
            order()
        return True

    def _cancel(self, call: int) -> None:
        self._decoder.cancel(call)
        self._open.pop(call, None)

    def _serve(self, number: int, swap: Callable[[int], None], version: int) -> None:
        if version > self._decoder.version:
            swap(version)
        self._answer([(number, None)])

    def _end(self, error: Callable[[], TreadleError]) -> None:
        """Refuses further orders and fails all that are open."""
        with self._gate:
            self._ended = error
        self._answer([(number, error()) for number in self._open])

    def _answer(
        self,
        answers: Sequence[tuple[int, object]],
        pieces: Sequence[_Piece] = (),
    ) -> None:
        """Tells pieces, then answers; wakes each event loop once."""
        by_loop: dict[asyncio.AbstractEventLoop, tuple[list[_Piece], list[_Answer]]] = {}
        for number, piece in pieces:
            listener = self._heard.get(number)
            if listener is not None:
                by_loop.setdefault(listener[0], ([], []))[0].append((number, piece))
        for number, outcome in answers:
            future = self._open.pop(number)
            by_loop.setdefault(future.get_loop(), ([], []))[1].append((future, outcome))
        for loop, (said, own) in by_loop.items():
            # A loop that was closed has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._deliver, said, own)

    def _deliver(self, said: Sequence[_Piece], answers: Sequence[_Answer]) -> None:
        for number, piece in said:
            if (listener := self._heard.get(number)) is not None:  # else it has been cancelled
                listener[1](piece)
        for future, outcome in answers:
            if future.done():
                continue
            if isinstance(outcome, TreadleError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
