"""Step time with packing over that with padding, as JSON lines.

    python services/trainer/benches/packing.py [--rounds 5] [--device cpu] [--size 0.4M]

Both arms run interleaved in this process on one thread, from the same parameters, on the same
episodes, whose lengths are drawn from a log-normal distribution (median 48 tokens, sigma 1, at most
1,024): `train_step`, which packs; and the bare loop of `step.py`, one row a segment, padded to the
longest row of its micro-batch. Both may hold as many places in a micro-batch, padding included. The
padded arm fills micro-batches in the order in which episodes come; a second one sorts them by
length first. Seconds are CPU seconds of the process (wall-clock on a GPU). The check: the gradients
of a step differ by at most 1e-5 of their norm.
"""

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import BETAS, LEARNING_RATE, MAX_NORM, PROMPT, SIZES, Bare, groups_of
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from treadle_runtime.measures import Measure, report
from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.packing import Example, MicroBatch, lay_out
from treadle_trainer.core.step import StepSettings, train_step
from treadle_trainer.core.weighing import weigh

MEDIAN, SIGMA, LONGEST = 48, 1.0, 1024
MICROBATCH_TOKENS = 2048
TOLERANCE = 1e-5


class Kept(SingleBackend):
    """Keeps the gradient of its last update."""

    gradient: dict[str, Tensor]

    def update(self, learning_rate: float) -> None:
        """Updates, and keeps."""
        named = self._parameters.items()
        self.gradient = {name: p.grad.clone() for name, p in named if p.grad is not None}
        super().update(learning_rate)


def main() -> int:
    """Measures all arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="0.4M", choices=sorted(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = Qwen3Config(
            **SIZES[options.size], max_position_embeddings=LONGEST, tie_word_embeddings=False
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return report(_measures(Path(folder), options))


def _measures(folder: Path, options: argparse.Namespace) -> Sequence[Measure]:
    groups = groups_of(int(SIZES[options.size]["vocab_size"]), _length)
    examples = [example for group in groups for example in weigh(group, Grpo())]
    orders = {"padded": examples, "sorted": sorted(examples, key=lambda e: -e.num_tokens)}
    batches = {name: [*_padded(order)] for name, order in orders.items()}
    packed = Kept(folder, betas=BETAS, device=options.device)
    bare = {name: Bare(folder, each, options.device) for name, each in batches.items()}

    def step() -> None:
        train_step(
            packed,
            groups,
            advantage=Grpo(),
            loss=PpoClip(),
            settings=StepSettings(MICROBATCH_TOKENS, MAX_NORM),
            learning_rate=LEARNING_RATE,
        )

    difference = 0.0
    step()
    for each in bare.values():
        each.gather()
        difference = max(difference, _difference(packed.gradient, each))
        each.step()
    if not difference <= TOLERANCE:
        raise SystemExit(f"gradients differ by {difference} of their norm")
    arms = {"packed": step} | {name: each.step for name, each in bare.items()}
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    for _ in range(options.rounds):
        for name, arm in arms.items():
            start = clock()
            arm()
            if options.device != "cpu":
                torch.cuda.synchronize()
            seconds[name].append(clock() - start)
    medians = {name: statistics.median(runs) for name, runs in seconds.items()}
    lengths = [example.num_tokens for example in examples]
    details: dict[str, Any] = {
        "size": options.size,
        "tokens": sum(lengths),
        "longest": max(lengths),
        "places": {name: _places(each) for name, each in batches.items()},
        "gradient_difference": difference,
        "seconds": {name: [round(run, 4) for run in runs] for name, runs in seconds.items()},
        "load1": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    return [
        Measure(f"packing_over_{said}", medians[arm] / medians["packed"], "ratio", goal, details)
        for said, arm, goal in (("padding", "padded", ">= 2"), ("sorted_padding", "sorted", "none"))
    ]


def _padded(examples: Sequence[Example]) -> Iterator[MicroBatch]:
    """Micro-batches with as many places as a packed one: rows times the longest of them."""
    members: list[Example] = []
    for example in examples:
        longest = max(each.num_tokens for each in (*members, example))
        if members and longest * (len(members) + 1) > MICROBATCH_TOKENS:
            yield lay_out(members)
            members = []
        members.append(example)
    yield lay_out(members)


def _places(batches: Sequence[MicroBatch]) -> int:
    """Places of all rows, padding included."""
    return sum(
        (int(each.segment_ids[-1]) + 1) * (int(each.position_ids.max()) + 1) for each in batches
    )


def _difference(ours: dict[str, Tensor], bare: Bare) -> float:
    """Norm of the difference of two gradients, over that of one."""
    theirs = {n: p.grad for n, p in bare.model.named_parameters() if p.grad is not None}
    if ours.keys() != theirs.keys():
        raise SystemExit(f"gradients of {len(ours)} and {len(theirs)} parameters")
    apart = sum(float((grad - theirs[name]).double().square().sum()) for name, grad in ours.items())
    norm = sum(float(grad.double().square().sum()) for grad in ours.values())
    return (apart / norm) ** 0.5


def _length(rng: np.random.Generator) -> int:
    drawn = float(rng.lognormal(math.log(MEDIAN), SIGMA))
    return min(max(int(drawn), PROMPT + 4), LONGEST)


if __name__ == "__main__":
    raise SystemExit(main())
