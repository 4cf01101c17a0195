"""Speed of the trainer's step against a bare torch loop, as JSON lines.

    python services/trainer/benches/step.py [--rounds 7] [--device cpu] [--size 0.4M]

Both arms run interleaved in this process on one thread, from the same parameters, over the same
micro-batches: `train_step` on groups of recorded episodes, with advantages, packing, the clipped
loss, its statistics, clipping and AdamW; and a loop that holds the laid-out tensors already, with
the causal attention of transformers over one row a segment, cross entropy, clipping and AdamW.
Seconds are CPU seconds of the process (wall-clock on a GPU). The check: the first step of both arms
leaves the same parameters.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from treadle_core.episodes import Episode, Group, Segment, Termination
from treadle_runtime.measures import Measure, report
from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.packing import MicroBatch, pack
from treadle_trainer.core.step import StepSettings, train_step
from treadle_trainer.core.weighing import weigh

SIZES: dict[str, dict[str, Any]] = {
    "0.4M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 32,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    "5M": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 1024,
           "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
}  # fmt: skip
TASKS, GROUP_SIZE, LONGEST, PROMPT = 16, 8, 60, 12
MICROBATCH_TOKENS = 1024
BETAS, LEARNING_RATE, MAX_NORM = (0.9, 0.95), 1e-4, 1.0
GOAL = ">= 0.9"


def main() -> int:
    """Measures both arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="0.4M", choices=sorted(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = Qwen3Config(
            **SIZES[options.size], max_position_embeddings=1024, tie_word_embeddings=False
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return report(_measure(Path(folder), options))


def _measure(folder: Path, options: argparse.Namespace) -> Sequence[Measure]:
    groups = groups_of(
        int(SIZES[options.size]["vocab_size"]),
        lambda rng: int(rng.integers(LONGEST // 3, LONGEST + 1)),
    )
    backend = SingleBackend(folder, betas=BETAS, device=options.device)
    examples = [example for group in groups for example in weigh(group, Grpo())]
    bare = Bare(folder, pack(examples, max_tokens=MICROBATCH_TOKENS), options.device)
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    seconds: dict[str, list[float]] = {"trainer": [], "bare": []}
    for round_ in range(options.rounds + 1):
        start = clock()
        train_step(
            backend,
            groups,
            advantage=Grpo(),
            loss=PpoClip(),
            settings=StepSettings(MICROBATCH_TOKENS, MAX_NORM),
            learning_rate=LEARNING_RATE,
        )
        _synchronize(options.device)
        middle = clock()
        bare.step()
        _synchronize(options.device)
        if round_ == 0:  # also the warm-up
            _check(backend, bare)
            continue
        seconds["trainer"].append(middle - start)
        seconds["bare"].append(clock() - middle)
    tokens = sum(e.segments[0].num_tokens for group in groups for e in group.episodes)
    rates = {arm: tokens / statistics.median(runs) for arm, runs in seconds.items()}
    details: dict[str, Any] = {
        "size": options.size,
        "tokens_per_s": {arm: round(rate) for arm, rate in rates.items()},
        "seconds": {arm: [round(run, 4) for run in runs] for arm, runs in seconds.items()},
        "load1": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    ratio = rates["trainer"] / rates["bare"]
    return [Measure("trainer_over_bare_loop", ratio, "ratio", GOAL, details)]


def groups_of(vocabulary: int, length: Callable[[np.random.Generator], int]) -> list[Group]:
    """Episodes of one segment, as long as drawn: a prompt, and what was sampled after it."""
    rng = np.random.default_rng(0)
    return [
        Group(
            f"task-{task}",
            tuple(
                Episode(
                    (_segment(rng, vocabulary, length(rng)),),
                    float(index % 2),
                    Termination.FINISHED,
                )
                for index in range(GROUP_SIZE)
            ),
        )
        for task in range(TASKS)
    ]


def _segment(rng: np.random.Generator, vocabulary: int, length: int) -> Segment:
    sampled = np.arange(length) >= PROMPT
    versions = np.where(sampled, 1, -1).astype(np.int32)
    return Segment(
        token_ids=rng.integers(vocabulary, size=length).astype(np.int32),
        sampled=sampled,
        trained=sampled.copy(),
        logprobs=np.where(sampled, -np.log(vocabulary), 0).astype(np.float32),
        policy_version=versions,
        context_version=versions.copy(),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One micro-batch, one row a segment, padded to the longest."""

    token_ids: Tensor
    places: Tensor
    """Of what predicts a trained token, in the flattened rows."""
    targets: Tensor
    logprobs: Tensor
    advantages: Tensor

    @classmethod
    def of(cls, packed: MicroBatch, device: str) -> "Rows":
        """Lays a packed micro-batch out."""
        longest = int(packed.position_ids.max()) + 1
        token_ids = np.zeros((int(packed.segment_ids[-1]) + 1, longest), np.int64)
        token_ids[packed.segment_ids, packed.position_ids] = packed.token_ids
        places = packed.segment_ids[packed.rows] * longest + packed.position_ids[packed.rows]
        arrays = (token_ids, places, packed.targets, packed.logprobs, packed.advantages)
        return cls(*(torch.from_numpy(array).to(device) for array in arrays))


class Bare:
    """The same step with nothing around it."""

    def __init__(self, folder: Path, batches: Sequence[MicroBatch], device: str) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model = model.to(device).eval()
        self._rows = [Rows.of(each, device) for each in batches]
        self._tokens = sum(len(rows.targets) for rows in self._rows)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), LEARNING_RATE, BETAS, weight_decay=0.0, fused=True
        )

    def step(self) -> None:
        """Forward, loss, backward, clip, update."""
        self.gather()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def gather(self) -> None:
        """All of it but the update."""
        for rows in self._rows:
            output = self.model(input_ids=rows.token_ids, use_cache=False)
            logits = output.logits.flatten(0, 1)[rows.places]
            logprobs = -torch.nn.functional.cross_entropy(logits, rows.targets, reduction="none")
            ratio = (logprobs - rows.logprobs).exp()
            clipped = ratio.clamp(0.8, 1.2)
            gain = torch.minimum(ratio * rows.advantages, clipped * rows.advantages)
            (-gain.sum() / self._tokens).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)


def _check(backend: SingleBackend, bare: Bare) -> None:
    """Fails the run unless both arms computed the same step."""
    ours = backend.parameters()
    for name, theirs in bare.model.named_parameters():
        worst = float((ours[name] - theirs.detach()).abs().max())
        if not worst <= LEARNING_RATE / 10:
            raise SystemExit(f"{name} differs by {worst} after one step")


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


if __name__ == "__main__":
    raise SystemExit(main())
