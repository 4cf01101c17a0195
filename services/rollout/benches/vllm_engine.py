"""Speed and truth of engine `vllm`, as JSON lines: against bare vLLM, and a float32 forward.

    python services/rollout/benches/vllm_engine.py [--rounds 5] [--size 5M] [--calls 64]

Both arms of the ratio run interleaved in this process on the same prompts, each on an engine of
its own that is started alike: calls through the adapter, and calls of `AsyncLLMEngine.generate`
that ask for the same tokens and log-probabilities once they are whole. Which arm goes first
alternates. Log-probabilities come from an engine of size 5M in float32, before and after an install
amid its calls, and are held against a fresh forward in float32 of the version of each token.
"""

# pyright: reportMissingModuleSource=false

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from treadle_agents.record import Generated
from treadle_core.tickets import Sampling
from treadle_rollout.adapters.vllm_engine import versions
from treadle_rollout.adapters.vllm_engine.engine import VllmEngine
from treadle_rollout.ports import GenerationRequest
from treadle_runtime.measures import Measure, report

SIZES: dict[str, dict[str, Any]] = {
    "0.4M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
             "vocab_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 32},
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 1024,
           "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128},
}  # fmt: skip
PROMPT, TOKENS = 64, 128
MAX_CONTEXT = 1024
CACHE_BYTES = {True: 2**29, False: 2**34}
"""Of each engine's keys, by whether it is on the CPU."""
SHARE = 0.4
"""Of a GPU's memory, for each engine."""
TEMPERATURES = (0.6, 1.0, 1.5)
Prompts = Sequence[NDArray[np.int32]]


def main() -> int:
    """Measures both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size", default="5M", choices=sorted(SIZES))
    parser.add_argument("--calls", type=int, default=64)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    transformers_logging.disable_progress_bar()
    return report(_measures(options))


def _measures(options: argparse.Namespace) -> Iterator[Measure]:
    for size, measure in ((options.size, _speed), ("5M", _truth)):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = Qwen3Config(
                **SIZES[size], max_position_embeddings=MAX_CONTEXT, tie_word_embeddings=False
            )
            model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.eval().save_pretrained(folder)
            yield asyncio.run(measure(model, Path(folder), options))


async def _speed(model: Any, folder: Path, options: argparse.Namespace) -> Measure:
    adapter = _adapter(folder, options.dtype, options.calls)
    await _install(adapter, model, 1)
    bare = _bare(folder, options.dtype, options.calls)
    arms: list[tuple[str, Callable[[Prompts], Awaitable[int]]]] = [
        ("adapter", lambda prompts: _through(adapter, prompts)),
        ("bare", lambda prompts: _plainly(bare, prompts)),
    ]
    runs: dict[str, list[float]] = {name: [] for name, _ in arms}
    for round_ in range(options.rounds + 1):
        prompts = _prompts(model, options.calls, seed=round_)
        for name, arm in arms if round_ % 2 else arms[::-1]:
            start = time.perf_counter()
            tokens = await arm(prompts)
            seconds = time.perf_counter() - start
            if tokens != options.calls * TOKENS:
                raise SystemExit(f"{name} sampled {tokens} tokens")
            if round_:  # the first warms up
                runs[name].append(tokens / seconds)
    await adapter.close()
    await asyncio.to_thread(bare.shutdown)
    ratios = [mine / other for mine, other in zip(runs["adapter"], runs["bare"], strict=True)]
    details = {
        **_circumstances(options),
        "tokens_per_s": {name: round(statistics.median(rates)) for name, rates in runs.items()},
        "runs": {name: [round(rate) for rate in rates] for name, rates in runs.items()},
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
    name = "adapter_over_bare_engine"
    return Measure(name, statistics.median(ratios), "ratio", ">= 0.97", details)


async def _truth(model: Any, folder: Path, options: argparse.Namespace) -> Measure:
    # On a GPU: the kernels that take float32 and round nothing.
    exact = {} if versions.on_cpu() else {"attention_backend": "FLEX_ATTENTION"}
    slots = len(TEMPERATURES) * 2
    engine = _adapter(folder, "float32", slots, cuda_graphs=False, **exact)
    await _install(engine, model, 1)
    first = {name: value.detach().clone() for name, value in model.named_parameters()}
    prompts = _prompts(model, slots, seed=0)
    samplings = [Sampling(each, TOKENS * 2) for each in TEMPERATURES * 2]
    calls = [
        asyncio.create_task(engine.generate(GenerationRequest(str(i), ids, sampling)))
        for i, (ids, sampling) in enumerate(zip(prompts, samplings, strict=True))
    ]
    beat = GenerationRequest("beat", prompts[0], Sampling(1.0, TOKENS // 2))
    await engine.generate(beat)  # the others are amid their turns
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.02 * torch.randn_like(value))
    await _install(engine, model, 2)
    turns = await asyncio.gather(*calls)
    await engine.close()
    second = dict(model.named_parameters())
    worst = max(
        _difference(model, {1: first, 2: second}, ids, turn, sampling.temperature)
        for ids, turn, sampling in zip(prompts, turns, samplings, strict=True)
    )
    spanning = sum(np.unique(turn.policy_version).size > 1 for turn in turns)
    if not spanning:
        raise SystemExit("no turn spans the install")
    details = {
        **_circumstances(options),
        "size": "5M",
        "dtype": "float32",
        "tokens": int(sum(turn.token_ids.size for turn in turns)),
        "turns_over_an_install": int(spanning),
    }
    return Measure("logprob_diff_fp32", worst, "nats", "<= 1e-4", {"worst": worst, **details})


@torch.inference_mode()
def _difference(
    model: Any,
    parameters: dict[int, dict[str, torch.Tensor]],
    prompt: NDArray[np.int32],
    turn: Generated,
    temperature: float,
) -> float:
    """Largest difference of a turn's log-probabilities to a fresh forward's."""
    ids = torch.from_numpy(np.concatenate([prompt, turn.token_ids])).long()
    worst = 0.0
    for version in np.unique(turn.policy_version).tolist():
        call = torch.func.functional_call(model, parameters[version], (ids[None],))
        logprobs = torch.log_softmax(call.logits[0].float() / temperature, -1)
        fresh = logprobs[prompt.size - 1 : -1].gather(1, ids[prompt.size :, None])[:, 0].numpy()
        own = turn.policy_version == version
        worst = max(worst, float(np.abs(fresh - turn.logprobs)[own].max()))
    return worst


def _adapter(folder: Path, dtype: str, slots: int, **more: Any) -> VllmEngine:
    return VllmEngine(
        folder,
        MAX_CONTEXT,
        slots,
        dtype=dtype,
        stop_tokens=(),
        cache_bytes=CACHE_BYTES[versions.on_cpu()],
        gpu_memory=SHARE,
        **more,
    )


def _bare(folder: Path, dtype: str, slots: int) -> Any:
    """VLLM itself, with what bears on speed as the adapter has it."""
    from vllm import AsyncEngineArgs, AsyncLLMEngine  # noqa: PLC0415

    return AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=dtype,
            max_model_len=MAX_CONTEXT,
            max_num_seqs=slots,
            enforce_eager=versions.on_cpu(),
            gpu_memory_utilization=SHARE,
            kv_cache_memory_bytes=CACHE_BYTES[versions.on_cpu()],
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )
    )


async def _through(engine: VllmEngine, prompts: Prompts) -> int:
    sampling = Sampling(1.0, TOKENS)
    turns = await asyncio.gather(
        *(
            engine.generate(GenerationRequest(str(i), ids, sampling))
            for i, ids in enumerate(prompts)
        )
    )
    return sum(turn.token_ids.size for turn in turns)


_NUMBERS = itertools.count()


async def _plainly(engine: Any, prompts: Prompts) -> int:
    from vllm import SamplingParams  # noqa: PLC0415
    from vllm.inputs import tokens_input  # noqa: PLC0415
    from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

    params = SamplingParams(
        temperature=1.0,
        max_tokens=TOKENS,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    async def call(ids: NDArray[np.int32]) -> int:
        size = 0
        prompt = tokens_input(prompt_token_ids=ids.tolist())
        async for output in engine.generate(prompt, params, f"bare-{next(_NUMBERS)}"):
            size += len(output.outputs[0].token_ids)
        return size

    return sum(await asyncio.gather(*map(call, prompts)))


async def _install(engine: VllmEngine, model: Any, version: int) -> None:
    for rectangle in engine.layout.rectangles:
        parameter = model.get_parameter(rectangle.tensor).detach().contiguous()
        view = parameter.view(-1).view(torch.uint8).numpy()
        engine.arrival[rectangle.offset : rectangle.end] = view
    await engine.install(version)


def _prompts(model: Any, number: int, *, seed: int) -> list[NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return list(rng.integers(model.config.vocab_size, size=(number, PROMPT)).astype(np.int32))


def _circumstances(options: argparse.Namespace) -> dict[str, Any]:
    import vllm  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    return {
        "size": options.size,
        "dtype": options.dtype,
        "calls": options.calls,
        "device": current_platform.get_device_name() or "cpu",
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "load1": os.getloadavg()[0],
    }


if __name__ == "__main__":
    raise SystemExit(main())
