"""All that this adapter knows of vLLM's own names, and what differs between its versions.

Importing this imports vLLM; nothing else here does, but `worker`, which runs inside it.
"""

# pyright: reportMissingModuleSource=false
# vLLM is not installed where this is checked: typings/vllm says what is used of it.

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

# Before the import, for vLLM and the processes that it starts: figures go to stdout here, nobody
# is told over the network what runs, and a token is drawn from the distribution that is reported.
# What the user has set stays.
for _name, _value in (
    ("VLLM_LOGGING_STREAM", "ext://sys.stderr"),
    ("VLLM_LOGGING_LEVEL", "WARNING"),
    ("VLLM_NO_USAGE_STATS", "1"),
    ("VLLM_USE_FLASHINFER_SAMPLER", "0"),
):
    os.environ.setdefault(_name, _value)

import vllm  # noqa: E402
from vllm import AsyncEngineArgs, AsyncLLMEngine, RequestOutput, SamplingParams  # noqa: E402
from vllm.inputs import tokens_input  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams  # noqa: E402
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # noqa: E402

from treadle_core.errors import Kind, TreadleError  # noqa: E402
from treadle_rollout.adapters.vllm_engine.worker import OWNER  # noqa: E402

OLDEST, NEWEST = (0, 26), (0, 32)
"""The versions that this adapter was checked with, by the conformance suite, and those between."""

DEAD = (EngineDeadError, EngineGenerateError)
"""What a call raises whose engine core has ended or failed."""

_WORKER = "treadle_rollout.adapters.vllm_engine.worker.ArrivalWorker"


class UnsupportedVllmError(TreadleError):
    """A version of vLLM that nobody has checked this adapter with."""

    kind = Kind.INVALID
    reason = "UNSUPPORTED_VLLM"

    def __init__(self, version: str) -> None:
        limit = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
        super().__init__(
            f"vllm: expected version {limit}, got {version}",
            field="vllm.__version__",
            limit=limit,
            value=version,
        )


def check(version: str) -> None:
    """Raises UnsupportedVllmError, unless the adapter was checked with this version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        raise UnsupportedVllmError(version)


def on_cpu() -> bool:
    """The installed vLLM computes on the CPU."""
    return bool(current_platform.is_cpu())


def start(arguments: Mapping[str, Any]) -> "EngineCore":
    """Starts an engine with arguments of `AsyncEngineArgs`; returns when it can be called.

    Raises UnsupportedVllmError, and whatever vLLM raises for arguments that it refuses.
    """
    check(vllm.__version__)
    os.environ[OWNER] = str(os.getpid())
    if on_cpu():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # there is no compiler for its kernels
    return EngineCore(
        AsyncLLMEngine.from_engine_args(
            AsyncEngineArgs(
                **arguments,
                # Of the distribution that was sampled from, not the one before its shaping.
                logprobs_mode="processed_logprobs",
                # No sampling of the checkpoint's own.
                generation_config="vllm",
                worker_extension_cls=_WORKER,
                disable_log_stats=True,
            )
        )
    )


class EngineCore:
    """A running vLLM, in the words of this adapter. Calls raise one of `DEAD`."""

    def __init__(self, engine: AsyncLLMEngine) -> None:
        self._engine = engine
        self.reports = "weight_versions" in _fields_of_an_output()
        """It says of each token which weights sampled it; since 0.32 or shortly before."""

    def stream(self, call: str, token_ids: Sequence[int], salt: str, params: SamplingParams) -> Any:
        """Outputs of one call as they are sampled, an asynchronous generator of RequestOutput.

        Closing it ends the call. Keys are shared only with calls of the same salt.
        """
        prompt = tokens_input(prompt_token_ids=list(token_ids), cache_salt=salt)
        return self._engine.generate(prompt, params, call)

    async def abort(self, call: str) -> None:
        """Ends a call."""
        await self._engine.abort(call)

    async def pause(self) -> None:
        """Ends the running step and starts no other; calls stay. Its outputs are on their way."""
        await self._engine.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Goes on with the calls that there are."""
        await self._engine.resume_generation()

    async def recompute(self) -> bool:
        """Of a paused engine: running calls compute all their keys anew, and none is kept.

        Returns whether it is so.
        """
        return await self._engine.reset_prefix_cache(reset_running_requests=True)

    async def on_workers(self, method: str, *arguments: Any) -> None:
        """Calls a method of every worker."""
        await self._engine.collective_rpc(method, args=arguments)

    async def label(self, version: int) -> None:
        """Names the weights of a paused engine, where it reports them."""
        if self.reports:
            await self._engine.update_weight_version(str(version))

    def reported(self, output: RequestOutput) -> list[tuple[int, int]]:
        """Of a last output, where it reports them: versions, and how many tokens each sampled."""
        spans: Any = output.outputs[0].weight_versions
        return [(int(span.version), span.end - span.start) for span in spans or ()]

    def shutdown(self) -> None:
        """Ends its processes; blocks until they have ended."""
        self._engine.shutdown()


def sampling_params(*, grammar: str | None, whole: bool, **pinned: Any) -> SamplingParams:
    """Sampling of one call, with each token's log-probability.

    Its one output is the whole turn, or outputs hold what is new in them.
    """
    return SamplingParams(
        **pinned,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA,
        structured_outputs=None if grammar is None else StructuredOutputsParams(grammar=grammar),
    )


def _fields_of_an_output() -> frozenset[str]:
    from vllm.outputs import CompletionOutput  # noqa: PLC0415

    return frozenset(CompletionOutput.__dataclass_fields__)
