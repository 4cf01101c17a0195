"""What fetching payloads costs a trainer's steps, as JSON lines.

    python services/trainer/benches/fetch.py [--rounds 2] [--steps 4] [--megabytes 2] [--size 5M]

Three arms take the same steps on the same batches, in blocks that alternate, in this process on one
compute thread: segments that lie in memory; payloads read from a store of files when they are
needed; and read ahead, two batches deep, as the trainer does while it computes. An episode has one
segment that is trained and a long one of context only, so that a payload is megabytes and a step is
not. The trainer is idle while it reads and checks a batch. The check: all arms leave the same
parameters.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from step import SIZES
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import logging as transformers_logging

from treadle_core.episodes import NO_VERSION, Segment, Termination
from treadle_payloads.codec import encode_payload
from treadle_payloads.files import FileStore
from treadle_runtime.measures import Measure, report
from treadle_trainer import training
from treadle_trainer.adapters.payload_reader import StoredPayloads
from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.claims import Claim, ClaimedEpisode, ClaimedTask
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.core.step import StepSettings
from treadle_trainer.ports import PayloadReader, Read
from treadle_trainer.prefetch import DEPTH, Prefetched
from treadle_trainer.recipe import Recipe

TASKS, GROUP_SIZE, LENGTH = 4, 4, 256
BYTES_A_TOKEN = 10
"""Of a segment of one version: ids, log-probabilities and two masks."""
ROOM = 1 << 30


@dataclass(slots=True)
class InMemory:
    """PayloadReader over what was decoded before."""

    segments: dict[str, tuple[Segment, ...]]

    def read(self, episodes: Sequence[ClaimedEpisode]) -> list[Read]:
        return [self.segments[episode.episode_id] for episode in episodes]


@dataclass(slots=True)
class Times:
    """Of an arm, a value a step, in seconds."""

    fetch: list[float]
    step: list[float]


def main() -> int:
    """Measures all arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=4, help="of a block, more than are looked ahead"
    )
    parser.add_argument("--megabytes", type=float, default=2.0, help="of a payload")
    parser.add_argument("--size", default="5M", choices=sorted(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        return report(_measure(Path(directory), options))


def _measure(directory: Path, options: argparse.Namespace) -> Sequence[Measure]:
    store = FileStore(directory / "payloads")
    rng = np.random.default_rng(0)
    tokens = int(options.megabytes * 1e6 / BYTES_A_TOKEN)
    vocabulary = int(SIZES[options.size]["vocab_size"])
    claims = [_claim(rng, store, step, tokens, vocabulary) for step in range(options.steps)]
    stored = StoredPayloads(store)
    episodes = [episode for claim in claims for episode in claim.episodes]
    pairs = zip(episodes, stored.read(episodes), strict=True)
    decoded = {e.episode_id: cast("tuple[Segment, ...]", read) for e, read in pairs}
    readers: dict[str, PayloadReader] = {"memory": InMemory(decoded), "fetch": stored}
    recipe = _recipe(directory / "policy", options.size)
    times = {arm: Times([], []) for arm in (*readers, "prefetch")}
    left: dict[str, torch.Tensor] = {}
    for round_ in range(options.rounds + 1):
        for arm, kept in times.items():
            found = Times([], []) if round_ == 0 else kept  # the first round is the warm-up
            reader = readers.get(arm)
            prefetched = Prefetched(stored, ROOM) if reader is None else None
            left[arm] = _block(recipe, claims, reader or prefetched, prefetched, found)
    if not all(tensor.equal(left["memory"]) for tensor in left.values()):
        raise SystemExit("the arms computed different steps")
    return _measures(times, sum(e.payload.size for e in claims[0].episodes))


def _block(
    recipe: Recipe,
    claims: Sequence[Claim],
    reader: PayloadReader | None,
    prefetched: Prefetched | None,
    times: Times,
) -> torch.Tensor:
    """Takes the steps of all claims from the same parameters; returns some that it leaves."""
    assert reader is not None  # noqa: S101
    backend = recipe.build_backend(recipe.start)
    if prefetched is not None:  # the trainer waited for the first batch, and could read it ahead
        prefetched.expect(claims[0].episodes)
        prefetched.drain()
    for number, claim in enumerate(claims):
        began = time.perf_counter()
        if prefetched is not None:
            coming = [claims[(number + ahead) % len(claims)] for ahead in range(DEPTH + 1)]
            prefetched.expect(e for each in coming for e in each.episodes)
        groups = training.read_groups(claim, recipe=recipe, backend=backend, payloads=reader)
        fetched = time.perf_counter()
        training.train_groups(claim, groups, step=number + 1, recipe=recipe, backend=backend)
        times.fetch.append(fetched - began)
        times.step.append(time.perf_counter() - began)
    if prefetched is not None:
        prefetched.close()
    return next(iter(backend.parameters().values())).clone()


def _measures(times: dict[str, Times], batch_bytes: int) -> Sequence[Measure]:
    # Of equal work the least time is what the others of the machine did not take.
    step = {arm: min(each.step) for arm, each in times.items()}
    idle = {arm: sum(each.fetch) / sum(each.step) for arm, each in times.items()}
    details: dict[str, Any] = {
        "batch_megabytes": round(batch_bytes / 1e6, 1),
        "step_s": {arm: round(each, 4) for arm, each in step.items()},
        "idle": {arm: round(each, 4) for arm, each in idle.items()},
        "load1": os.getloadavg()[0],
        "torch": torch.__version__,
    }
    return [
        Measure("trainer_idle", idle["prefetch"], "share of a step", "<= 0.05", details),
        Measure("trainer_idle_unprefetched", idle["fetch"], "share of a step"),
        Measure("step_over_in_memory", step["prefetch"] / step["memory"], "ratio", "<= 1.05"),
        Measure("step_unprefetched_over_in_memory", step["fetch"] / step["memory"], "ratio"),
    ]


def _recipe(folder: Path, size: str) -> Recipe:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES[size], max_position_embeddings=1024, tie_word_embeddings=False)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Recipe(
        run_id="bench",
        holder="bench",
        start=folder,
        checkpoint_every=1,
        advantage=Grpo(),
        loss=PpoClip(),
        schedule=Schedule(1e-4),
        settings=StepSettings(1024, 1.0),
        build_backend=lambda folder: SingleBackend(folder, device="cpu"),
    )


def _claim(
    rng: np.random.Generator, store: FileStore, step: int, context: int, vocabulary: int
) -> Claim:
    tasks: list[ClaimedTask] = []
    for task in range(TASKS):
        episodes: list[ClaimedEpisode] = []
        for index in range(GROUP_SIZE):
            segments = (
                _segment(rng, LENGTH, 12, vocabulary),
                _segment(rng, context, context, vocabulary),
            )
            data = encode_payload(segments)
            episodes.append(
                ClaimedEpisode(
                    episode_id=f"{step}-{task}-{index}",
                    attempt=1,
                    reward=float(index % 2),
                    termination=Termination.FINISHED,
                    num_tokens=sum(segment.num_tokens for segment in segments),
                    num_trained=segments[0].num_trained,
                    versions=(1,),
                    oldest_step=0,
                    payload=store.put(data),
                )
            )
        tasks.append(ClaimedTask(f"{step}-{task}", tuple(episodes)))
    return Claim(tuple(tasks))


def _segment(rng: np.random.Generator, length: int, prompt: int, vocabulary: int) -> Segment:
    sampled = np.arange(length) >= prompt
    versions = np.where(sampled, 1, NO_VERSION).astype(np.int32)
    return Segment(
        token_ids=rng.integers(vocabulary, size=length).astype(np.int32),
        sampled=sampled,
        trained=sampled.copy(),
        logprobs=np.where(sampled, -np.log(vocabulary), 0).astype(np.float32),
        policy_version=versions,
        context_version=versions.copy(),
    )


if __name__ == "__main__":
    raise SystemExit(main())
