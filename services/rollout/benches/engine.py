"""Speed of engine `transformers`, as JSON lines: episodes of many turns, and against a bare loop.

    python services/rollout/benches/engine.py [--rounds 5] [--device cpu] [--sizes 0.4M,5M]

Both arms of the ratio run interleaved in this process on one thread: the engine answering 32 calls
of one length, and a loop over the same model with the cache and attention of transformers,
multinomial sampling and log-probabilities. Seconds are CPU seconds of the process (wall-clock on a
GPU). Every figure comes with its check: log-probabilities equal to a fresh forward.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config
from transformers.utils import logging as transformers_logging

from treadle_agents.record import Generated
from treadle_core.tickets import Sampling
from treadle_rollout.adapters.transformers_engine.engine import TransformersEngine
from treadle_rollout.ports import GenerationRequest
from treadle_runtime.measures import NONE, Measure, report

SIZES: dict[str, dict[str, Any]] = {
    "0.4M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 32,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 1024,
           "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128},
}  # fmt: skip
SESSIONS, PROMPT, TURN, REPLY, TURNS = 128, 14, 10, 5, 3
BATCH, BARE_PROMPT, BARE_TOKENS = 32, 16, 64
MAX_CONTEXT = 128
GOAL, GOAL_SIZE = ">= 0.8", "5M"
"""A smaller model spends its time between the kernels, in either arm."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.3}


def main() -> int:
    """Measures each size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=sorted(TOLERANCE))
    parser.add_argument("--sizes", default="0.4M,5M")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    return report(each for size in options.sizes.split(",") for each in _measures(size, options))


def _measures(size: str, options: argparse.Namespace) -> Iterator[Measure]:
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = Qwen3Config(**SIZES[size], max_position_embeddings=1024, tie_word_embeddings=False)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        yield asyncio.run(_measure(size, Path(folder), options))


async def _measure(size: str, folder: Path, options: argparse.Namespace) -> Measure:
    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    )
    reference = reference.to(options.device).eval()
    engine = TransformersEngine(
        folder, MAX_CONTEXT, SESSIONS, dtype=options.dtype, device=options.device, stop_tokens=()
    )
    for rectangle in engine.layout.rectangles:
        parameter = reference.get_parameter(rectangle.tensor).detach().cpu().contiguous()
        view = parameter.view(-1).view(torch.uint8).numpy()
        engine.arrival[rectangle.offset : rectangle.offset + view.size] = view
    await engine.install(1)
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    runs: dict[str, list[float]] = {"episodes": [], "static": [], "bare": []}
    await _episodes(engine, clock, 0)
    for round_ in range(options.rounds):
        rate, sample = await _episodes(engine, clock, round_ + 1)
        runs["episodes"].append(rate)
        runs["static"].append(await _static(engine, clock))
        runs["bare"].append(_bare(reference, clock))
        _check(reference, sample, TOLERANCE[options.dtype])
    await engine.close()
    medians = {name: statistics.median(values) for name, values in runs.items()}
    details = {
        "device": options.device,
        "dtype": options.dtype,
        "tokens_per_s": {name: round(rate) for name, rate in medians.items()},
        "runs": {name: [round(value) for value in values] for name, values in runs.items()},
        "load1": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    name = "engine_over_bare_loop" if size == GOAL_SIZE else f"engine_over_bare_loop_{size}"
    goal = GOAL if size == GOAL_SIZE else NONE
    return Measure(name, medians["static"] / medians["bare"], "ratio", goal, details)


async def _episodes(
    engine: TransformersEngine, clock: Callable[[], float], seed: int
) -> tuple[float, list[tuple[NDArray[np.int32], Generated]]]:
    """Sampled tokens a second of sessions of several turns, and one session's turns."""
    rng = np.random.default_rng(seed)
    vocabulary = 32
    kept: list[tuple[NDArray[np.int32], Generated]] = []

    async def session(name: str) -> int:
        sampled = 0
        for episode in range(2):
            ids = rng.integers(vocabulary, size=PROMPT).astype(np.int32)
            for _ in range(TURNS):
                request = GenerationRequest(f"{name}-{episode}", ids, Sampling(1.0, TURN))
                turn = await engine.generate(request)
                if name == "0":
                    kept.append((ids, turn))
                sampled += turn.token_ids.size
                reply = rng.integers(vocabulary, size=REPLY).astype(np.int32)
                ids = np.concatenate([ids, turn.token_ids, reply])
            engine.release(f"{name}-{episode}")
        return sampled

    start = clock()
    counts = await asyncio.gather(*(session(str(i)) for i in range(SESSIONS)))
    return sum(counts) / (clock() - start), kept


async def _static(engine: TransformersEngine, clock: Callable[[], float]) -> float:
    """Sampled tokens a second of calls of one length that start together."""
    ids = np.ones(BARE_PROMPT, np.int32)
    start = clock()
    turns = await asyncio.gather(
        *(
            engine.generate(GenerationRequest(f"static-{i}", ids, Sampling(1.0, BARE_TOKENS)))
            for i in range(BATCH)
        )
    )
    seconds = clock() - start
    for i in range(BATCH):
        engine.release(f"static-{i}")
    return sum(turn.token_ids.size for turn in turns) / seconds


@torch.inference_mode()
def _bare(model: Any, clock: Callable[[], float]) -> float:
    """Sampled tokens a second of the plain loop over the same work."""
    start = clock()
    ids = torch.ones((BATCH, BARE_PROMPT), dtype=torch.long, device=model.device)
    cache = DynamicCache(config=model.config)
    kept: list[tuple[Any, Any]] = []
    for _ in range(BARE_TOKENS):
        logits = model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        logprobs = torch.log_softmax(logits.float(), -1)
        ids = torch.multinomial(logprobs.exp(), 1)
        kept.append((ids.cpu().numpy(), logprobs.gather(1, ids).cpu().numpy()))
    return BATCH * len(kept) / (clock() - start)


@torch.inference_mode()
def _check(model: Any, turns: list[tuple[NDArray[np.int32], Generated]], tolerance: float) -> None:
    """Fails the run unless the recorded log-probabilities are those of a fresh forward."""
    for prompt, turn in turns:
        ids = torch.from_numpy(np.concatenate([prompt, turn.token_ids])).long().to(model.device)
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), -1)
        expected = logprobs[prompt.size - 1 : -1].gather(1, ids[prompt.size :, None])[:, 0]
        worst = float(np.abs(expected.cpu().numpy() - turn.logprobs).max())
        if not worst <= tolerance:
            raise SystemExit(f"log-probabilities differ by {worst}")


if __name__ == "__main__":
    raise SystemExit(main())
