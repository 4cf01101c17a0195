"""The engine as the replica sees it, over vLLM's.

A version is installed while vLLM is paused: every token that was sampled before has been stamped
by then, and calls in flight go on afterwards, their keys computed anew.
"""

import asyncio
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from treadle_agents.record import Generated
from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_core.tickets import CONSTRAINTS, SHAPES
from treadle_rollout.adapters.transformers_engine.grammar import Grammars
from treadle_rollout.adapters.transformers_engine.stops import stop_token_ids
from treadle_rollout.adapters.vllm_engine import sampling, versions
from treadle_rollout.adapters.vllm_engine.arrival import Arrival, Policy
from treadle_rollout.adapters.vllm_engine.constraints import follows
from treadle_rollout.adapters.vllm_engine.turns import Turn
from treadle_rollout.core.errors import (
    EngineBrokenError,
    EngineClosedError,
    NonFiniteLogprobError,
)
from treadle_rollout.core.requests import check_request
from treadle_rollout.ports import GenerationRequest, Heard
from treadle_weights.layouts import Layout

_DTYPES = ("float32", "bfloat16", "float16")
_QUIET_TURNS = 256
"""Turns of the event loop without an output after which none is left of a paused engine. vLLM
hands on at least one chunk of what it has received in every turn; a chunk may hold nothing but
what was sampled for cancelled calls, and the steps of a pause are at most 2 * 4096 / 128 chunks."""

_T = TypeVar("_T")


class Served(NamedTuple):
    """What is served: a version, and the one that brought its weights (an alias brings none)."""

    version: int
    weights: int


class _BrokenPromiseError(Exception):
    """What vLLM did is not what it says."""


class VllmEngine:
    """Engine `vllm`: a Hugging Face model on vLLM, which computes in processes of its own.

    Greedy calls (temperature 0) report the log-probability at temperature 1, whatever else shapes
    them. It honours every field of `Sampling`, but `schema` and `grammar` only with a tokenizer
    that llguidance takes and whose end of sequence is among the stop tokens. Keys of a prompt are
    shared between all calls under the same weights.

    Args:
        model: Hugging Face model folder.
        max_context: most tokens of prompt and generation together.
        slots: calls that run at once; further calls wait their turn, first come, first served.
        dtype: of parameters, keys and arithmetic: float32, bfloat16 or float16.
        seed: of the sampling.
        stop_tokens: tokens or ids that end a turn; by default those that the folder declares.
        arrival_dtype: of the parameters as the trainer sends them; they are cast to `dtype`.
        cuda_graphs: compile the model and replay CUDA graphs; on a GPU alone.
        tensor_parallel: GPUs that share the model.
        gpu_memory: share of each GPU's memory that vLLM may take, for weights and keys.
        attention_backend: of vLLM's, by the name that it has there; by default vLLM chooses.
        cache_bytes: of cached keys; 0 takes what `gpu_memory` leaves, and on the CPU 1 GiB.

    Raises:
        InvalidFieldError: an argument is outside its limits.
        UnsupportedModelError: the model cannot be served.
        UnsupportedVllmError: the installed vLLM is too old or too new.
    """

    def __init__(
        self,
        model: Path | str,
        max_context: int,
        slots: int,
        *,
        dtype: str = "float32",
        seed: int = 0,
        stop_tokens: Sequence[str | int] | None = None,
        arrival_dtype: str = "float32",
        cuda_graphs: bool = True,
        tensor_parallel: int = 1,
        gpu_memory: float = 0.85,
        attention_backend: str | None = None,
        cache_bytes: int = 0,
    ) -> None:
        folder = Path(model)
        if slots < 1:
            raise InvalidFieldError("engine.slots", limit=">= 1", value=slots)
        if dtype not in _DTYPES:
            raise InvalidFieldError("engine.dtype", limit=" | ".join(_DTYPES), value=dtype)
        policy = Policy(folder, arrival_dtype=arrival_dtype)
        if not 2 <= max_context <= policy.positions:
            limit = f"2 to {policy.positions}"
            raise InvalidFieldError("engine.max_context", limit=limit, value=max_context)
        self._vocabulary = policy.vocabulary
        self._layout = policy.layout
        self._max_context = max_context
        self._stops = stop_token_ids(folder, stop_tokens, vocabulary=policy.vocabulary)
        self._grammars = Grammars(folder, self._stops, policy.vocabulary)
        constrains = self._grammars.available and follows(folder, self._stops, policy.vocabulary)
        self._samplings = SHAPES if constrains else SHAPES - CONSTRAINTS
        self._core = versions.start(
            {
                "model": str(folder),
                "skip_tokenizer_init": not constrains,
                "structured_outputs_config": {"backend": "guidance"},
                "dtype": dtype,
                "seed": seed,
                "max_model_len": max_context,
                "max_num_seqs": slots,
                "enable_prefix_caching": True,
                "tensor_parallel_size": tensor_parallel,
                "attention_config": {"backend": attention_backend},
                **_places(cuda_graphs=cuda_graphs, share=gpu_memory, cache_bytes=cache_bytes),
            }
        )
        self._arrival = Arrival(policy.layout)
        self._mapped = False
        self._served = Served(0, 0)
        # Clear while nothing is served and while vLLM is paused: calls wait for it.
        self._open = asyncio.Event()
        self._swapping = asyncio.Lock()
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._submitted = 0
        self._outputs = 0
        self._non_finite = 0
        self._ended: Callable[[], TreadleError] | None = None

    @property
    def served_version(self) -> int:
        """Version installed now; 0 before the first install, until which calls wait."""
        return self._served.version

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and generation together."""
        return self._max_context

    @property
    def non_finite(self) -> int:
        """Calls that failed because a token had no finite log-probability."""
        return self._non_finite

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
        return self._layout

    @property
    def arrival(self) -> NDArray[np.uint8]:
        """Buffer that the next version's bytes are written into, [bytes]."""
        return self._arrival.bytes

    async def generate(self, request: GenerationRequest, heard: Heard | None = None) -> Generated:
        """Samples one turn. Cancelling the call frees its place at the next token.

        `heard` is told what came after each step of vLLM's, or after several where they come fast.

        Raises:
            InvalidFieldError: a field of the request is outside its limits.
            ContextOverflowError: the prompt leaves no room for a token.
            NonFiniteLogprobError: a sampled token has no finite log-probability.
            EngineClosedError: the engine is or was closed.
            EngineBrokenError: vLLM's core ended or failed.
        """
        check_request(
            request,
            vocabulary=self._vocabulary,
            max_context=self._max_context,
            samplings=self._samplings,
        )
        sampling.check_temperature(request.sampling)
        if CONSTRAINTS & request.sampling.shaped:
            await self._grammars.follower(request.sampling)  # it says what is wrong, by field
        return await self._run(self._sample(request, heard))

    def release(self, session: str) -> None:
        """Does nothing: what vLLM has cached goes when its place is needed."""

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
        await self._wholly(self._install(version))

    async def alias(self, version: int) -> None:
        """Serves on under another number: the weights of `version` are those served, bit for bit.

        Calls in flight go on with the keys that they have.

        Raises:
            InvalidFieldError: nothing is served, or a newer version.
            EngineClosedError, EngineBrokenError: as `generate`.
        """
        await self._wholly(self._alias(version))

    async def close(self) -> None:
        """Fails what runs with EngineClosedError and ends vLLM; may be called again."""
        self._end(EngineClosedError)
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._arrival.unlink()
        await asyncio.to_thread(self._core.shutdown)

    async def _wholly(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs it to its end, also where the caller is cancelled, who waits for it."""
        swap = asyncio.ensure_future(self._run(work))
        try:
            await asyncio.shield(swap)
        except asyncio.CancelledError:
            await asyncio.wait([swap])
            raise

    async def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Does it in a task of its own, which ends with the engine; names the engine's failures."""
        if self._ended is not None:
            work.close()
            raise self._ended()
        task = asyncio.create_task(work)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._ended is None or (own is not None and own.cancelling()):
                raise
            raise self._ended() from None
        except (*versions.DEAD, _BrokenPromiseError) as error:
            self._end(partial(EngineBrokenError, error))
            assert self._ended is not None  # noqa: S101, just set
            raise self._ended() from error
        finally:
            self._tasks.discard(task)

    def _end(self, error: Callable[[], TreadleError]) -> None:
        """Ends what runs, by the first cause that there was."""
        self._ended = self._ended or error
        for task in self._tasks:
            task.cancel()

    async def _sample(self, request: GenerationRequest, heard: Heard | None) -> Generated:
        await self._open.wait()
        prompt = request.token_ids
        # A turn that nobody hears comes whole where vLLM says which weights sampled it: an output a
        # token costs more than the token.
        whole = heard is None and self._core.reports
        params = versions.sampling_params(
            whole=whole,
            grammar=sampling.grammar_of(request.sampling),
            **sampling.parameters(
                request.sampling, room=self._max_context - prompt.size, stops=self._stops
            ),
        )
        # A call that spans an install keeps its salt; all that was cached under it is dropped then.
        salt = str(self._served.weights)
        call = f"{next(self._numbers)}"
        turn = Turn(prompt.size, self._stops)
        stream = cast("AsyncGenerator[Any]", self._core.stream(call, prompt.tolist(), salt, params))
        self._submitted += 1
        try:
            async with aclosing(stream):
                async for output in stream:
                    self._outputs += 1
                    try:
                        self._take(output, turn, heard, whole=whole)
                    except NonFiniteLogprobError as error:
                        self._non_finite += 1
                        if math.isnan(float(error.value)):
                            # It happens whole, whoever cancels the call.
                            await asyncio.shield(self._run(self._clean(call)))
                        raise
        finally:
            self._submitted -= 1
        return turn.piece(0, last=True)

    def _take(self, output: Any, turn: Turn, heard: Heard | None, *, whole: bool) -> None:
        """Adds what is new to the turn, and tells it."""
        start, said = len(turn), output.outputs[0]
        logprobs = said.logprobs.logprobs if said.logprobs else ()
        spans = [(self._served.version, len(said.token_ids))]
        if whole:
            spans = self._core.reported(output)
        if sum(count for _, count in spans) != len(said.token_ids):
            raise _BrokenPromiseError(f"{len(said.token_ids)} tokens are said to be {spans}")
        stamps = [version for version, count in spans for _ in range(count)]
        turn.add(said.token_ids, logprobs, stamps)
        if output.finished and self._core.reports:
            reported = self._core.reported(output)
            if reported != turn.spans():
                raise _BrokenPromiseError(f"of {reported} came {turn.spans()}")
        if heard is not None and len(turn) > start:
            heard(turn.piece(start, last=output.finished))

    async def _install(self, version: int) -> None:
        async with self._swapping:
            served = self._served.version
            if version < served:
                raise InvalidFieldError("version", limit=f">= {served}", value=version)
            if version == served:
                return
            await self._pause()
            if self._submitted:
                await self._recompute()
            arrival = self._arrival
            if not self._mapped:
                await self._core.on_workers(
                    "treadle_map", arrival.path, arrival.size, arrival.places
                )
                arrival.unlink()
                self._mapped = True
            await self._core.on_workers("treadle_install")
            await self._core.label(version)
            self._served = Served(version, version)
            await self._resume()

    async def _alias(self, version: int) -> None:
        async with self._swapping:
            if not 0 < self._served.version <= version:
                limit = f">= {self._served.version} > 0"
                raise InvalidFieldError("version", limit=limit, value=version)
            await self._pause()
            await self._core.label(version)
            self._served = self._served._replace(version=version)
            await self._resume()

    async def _clean(self, call: str) -> None:
        """Ends a call whose keys are not numbers, and all cached keys with it.

        A kernel may multiply what lies behind a sequence in its last block of keys by zero: what
        another call left there must be a number.
        """
        async with self._swapping:
            await self._pause()
            await self._core.abort(call)
            await self._recompute()
            await self._core.on_workers("treadle_clear_keys")
            await self._resume()

    async def _pause(self) -> None:
        self._open.clear()
        await self._core.pause()
        await self._drained()

    async def _resume(self) -> None:
        await self._core.resume()
        self._open.set()

    async def _recompute(self) -> None:
        if not await self._core.recompute():
            raise _BrokenPromiseError("keys of calls that run were kept")

    async def _drained(self) -> None:
        """Returns when all that a paused engine has sampled was taken."""
        quiet, seen = 0, self._outputs
        while quiet < _QUIET_TURNS:
            await asyncio.sleep(0)
            quiet = quiet + 1 if self._outputs == seen else 0
            seen = self._outputs


def _places(*, cuda_graphs: bool, share: float, cache_bytes: int) -> dict[str, Any]:
    """Where and how it computes, as arguments of vLLM's."""
    if not 0 < share <= 1:
        raise InvalidFieldError("engine.gpu_memory", limit="more than 0, up to 1", value=share)
    if cache_bytes < 0:
        raise InvalidFieldError("engine.cache_bytes", limit=">= 0", value=cache_bytes)
    if versions.on_cpu():
        return {"enforce_eager": True, "kv_cache_memory_bytes": cache_bytes or 2**30}
    memory = {"kv_cache_memory_bytes": cache_bytes} if cache_bytes else {}
    return {"enforce_eager": not cuda_graphs, "gpu_memory_utilization": share, **memory}
