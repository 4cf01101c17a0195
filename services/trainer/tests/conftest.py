"""Tiny policies with random parameters, and what to train them on."""

import asyncio
import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from treadle_core.episodes import Episode, Group, Segment, Termination
from treadle_payloads.codec import encode_payload
from treadle_payloads.files import FileStore
from treadle_payloads.store import PayloadReference
from treadle_runtime.tracker import JsonlTracker
from treadle_trainer.adapters.in_memory import MemoryExperience, MemoryRefit
from treadle_trainer.adapters.local_checkpoints import LocalCheckpoints
from treadle_trainer.adapters.payload_reader import StoredPayloads
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.claims import ClaimedEpisode, ClaimedTask
from treadle_trainer.core.logprobs import token_logprobs
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.packing import Example
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.core.step import StepSettings
from treadle_trainer.loop import Trainer
from treadle_trainer.recipe import Recipe, Surroundings
from treadle_weights.shared_memory import SharedMemory

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

VOCAB = 24
ENDS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1}
SHAPE = ENDS | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
QWEN3 = SHAPE | {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**QWEN3, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SHAPE, num_key_value_heads=4, tie_word_embeddings=True),
    "gpt2": lambda: GPT2Config(**ENDS, n_embd=32, n_layer=2, n_head=2, n_positions=128),
    "sliding": lambda: Qwen3Config(
        **QWEN3, use_sliding_window=True, sliding_window=5, max_window_layers=0
    ),
}


@pytest.fixture(scope="session")
def policies(tmp_path_factory) -> dict[str, Path]:
    """Hugging Face folders by architecture."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("policies")
    for name, config in CONFIGS.items():
        AutoModelForCausalLM.from_config(config()).save_pretrained(root / name)
        save_tokenizer(root / name)
    return {name: root / name for name in CONFIGS}


@pytest.fixture(scope="session")
def policy(policies) -> Path:
    """The one that most tests use."""
    return policies["qwen3"]


def save_tokenizer(folder: Path) -> None:
    """One token a character."""
    names = ["<pad>", "<end>", *"0123456789+-*/=abcdefgh"][:VOCAB]
    pad, end = names[:2]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=pad))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{end}|."), "isolated")
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)
    wrapped.save_pretrained(folder)


@pytest.fixture
def make_segment() -> Callable[..., Segment]:
    return segment


def segment(
    rng: np.random.Generator, length: int = 12, prompt: int = 4, version: int = 1, **changes
) -> Segment:
    """A prompt and what a policy answered, with a stretch of observation in between."""
    sampled = np.arange(length) >= prompt
    sampled[prompt + 2 : prompt + 3] = False
    versions = np.where(sampled, version, -1).astype(np.int32)
    fields = {
        "token_ids": rng.integers(2, VOCAB, length).astype(np.int32),
        "sampled": sampled,
        "trained": sampled.copy(),
        "logprobs": np.where(sampled, -rng.random(length) * 3, 0).astype(np.float32),
        "policy_version": versions,
        "context_version": versions.copy(),
    }
    return Segment(**(fields | changes))


@pytest.fixture
def make_group() -> Callable[..., Group]:
    return group


def group(
    rng: np.random.Generator, rewards: Sequence[float | None], task_id: str = "task"
) -> Group:
    """One episode a reward; every second one has two segments."""
    episodes = [
        Episode(
            tuple(segment(rng, int(rng.integers(8, 20))) for _ in range(1 + index % 2)),
            reward,
            Termination.FINISHED,
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(task_id, tuple(episodes))


@pytest.fixture
def make_examples() -> Callable[..., list[Example]]:
    return examples


def examples(rng: np.random.Generator, count: int, longest: int = 24) -> list[Example]:
    """Random examples, some at a temperature other than 1."""
    return [
        Example.of(
            segment(
                rng,
                int(rng.integers(6, longest + 1)),
                temperature=float(rng.choice([0.6, 1.0, 1.5])),
            ),
            float(rng.normal()),
        )
        for _ in range(count)
    ]


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> Path:
    """The smallest policy that trains: one layer, and weights that load in no time."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("small") / "policy"
    config = CONFIGS["qwen3"]()
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


class Table:
    """Backend whose policy is a table: logits of a token by the token before it.

    The life of a trainer costs next to nothing with it. SGD with momentum.
    """

    vocab_size = VOCAB

    def __init__(self, folder):
        self.table = load_file(folder / "model.safetensors")["table"].requires_grad_()
        self.momentum = torch.zeros_like(self.table)

    def logprobs(self, microbatch, *, entropy_gradient=False):
        before = torch.from_numpy(microbatch.token_ids[microbatch.rows])
        others = (torch.from_numpy(a) for a in (microbatch.targets, microbatch.temperatures))
        logits = torch.nn.functional.embedding(before, self.table)
        return token_logprobs(logits, *others, entropy_gradient=entropy_gradient)

    def add_up_gradient(self, ranks):
        grad = torch.zeros_like(self.table) if self.table.grad is None else self.table.grad
        ranks.add_up(grad)
        self.table.grad = grad

    def clip_gradient(self, max_norm):
        return float(torch.nn.utils.clip_grad_norm_([self.table], max_norm))

    def update(self, learning_rate):
        self.momentum.mul_(0.9).add_(self.table.grad)
        with torch.no_grad():
            self.table -= learning_rate * self.momentum
        self.discard_gradient()

    def discard_gradient(self):
        self.table.grad = None

    def parameters(self):
        return {"table": self.table.detach()}

    def save_policy(self, folder):
        save_file(self.parameters(), folder / "model.safetensors")

    def save_optimizer(self, folder):
        save_file({"momentum": self.momentum}, folder / "optimizer.safetensors")

    def restore_optimizer(self, folder):
        self.momentum = load_file(folder / "optimizer.safetensors")["momentum"]


@pytest.fixture(scope="session")
def table(tmp_path_factory) -> Path:
    """Folder of a policy that is a table."""
    folder = tmp_path_factory.mktemp("table")
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
    save_file({"table": logits}, folder / "model.safetensors")
    return folder


@pytest.fixture
def backend_class() -> type[Table]:
    return Table


class Run:
    """One run's ledger, directories and peers; trainers come and go."""

    def __init__(self, directory, policy, payloads, batches):
        self.directory = directory
        self.policy = policy
        self.transport = SharedMemory(directory)
        self.experience = MemoryExperience(batches)
        self.refit = MemoryRefit(self.experience, self.transport)
        self.sender = self.transport.sender("memory")
        self.payloads = StoredPayloads(payloads)
        self.store = LocalCheckpoints(directory / "checkpoints")
        self.trainers = 0

    def trainer(self, guard=lambda port: port, **changes):
        self.trainers += 1
        recipe = Recipe(
            run_id="run",
            holder=f"trainer-{self.trainers}",
            start=self.policy,
            checkpoint_every=2,
            advantage=Grpo(),
            loss=PpoClip(),
            schedule=Schedule(1e-2),
            settings=StepSettings(512, 1.0),
            build_backend=Table,
        )
        surroundings = Surroundings(
            experience=guard(self.experience),
            refit=guard(self.refit),
            sender=self.sender,
            payloads=self.payloads,
            store=guard(self.store),
            tracker=JsonlTracker(self.directory / "trainer.jsonl"),
        )
        return Trainer(replace(recipe, **changes), surroundings)

    def weights(self):
        """Digests of what was published last."""
        return self.refit.committed[-1][2]

    def published_steps(self):
        return [step for _, step, _ in self.refit.committed]

    def rows(self):
        lines = (self.directory / "trainer.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    async def finish(self, trainer):
        """Runs to the end; final evaluation is done as soon as the trainer stands by."""
        self.experience.complete.set()
        await trainer.run()

    @staticmethod
    async def until(condition, task):
        """Lets `task` run until the condition holds, which it must before it ends."""
        while not condition():
            assert not task.done(), task
            await asyncio.wait([task], timeout=0.001)


@pytest.fixture(scope="session")
def payloads(tmp_path_factory):
    return FileStore(tmp_path_factory.mktemp("payloads"))


@pytest.fixture(scope="session")
def plain_batches(payloads):
    """Batches by step, made once: values, whose payloads stay in the store."""
    return functools.cache(lambda step: batch(group, payloads, step))


@pytest.fixture
def make_run(tmp_path, table, payloads, plain_batches):
    def make(num_steps=3, name="run", **changes):
        directory = tmp_path / name
        directory.mkdir()
        make_batch = plain_batches
        if changes:
            make_batch = functools.partial(batch, group, payloads, **changes)
        batches = [make_batch(step) for step in range(1, num_steps + 1)]
        return Run(directory, table, payloads, batches)

    return make


def batch(make_group, store, step, rewards=((1.0, 0.0, None, 1.0), (1.0, 1.0)), **changes):
    """Tasks of so many episodes; the payloads of all but the first task lie in the store."""
    rng = np.random.default_rng(step)
    tasks = []
    for number, task_rewards in enumerate(rewards):
        group = make_group(rng, task_rewards, f"{step}-{number}")
        episodes = []
        for index, episode in enumerate(group.episodes):
            data = encode_payload(episode.segments)
            if number:
                store.put(data)
            claimed = ClaimedEpisode(
                episode_id=f"{group.task_id}-{index}",
                attempt=1,
                reward=episode.reward,
                termination=episode.termination,
                num_tokens=sum(s.num_tokens for s in episode.segments),
                num_trained=sum(s.num_trained for s in episode.segments),
                versions=(1,),
                oldest_step=max(0, step - 2),
                payload=PayloadReference.of(data),
                inline=None if number else data,
                traceparent="" if number else TRACEPARENT,
            )
            episodes.append(replace(claimed, **changes))
        tasks.append(ClaimedTask(group.task_id, tuple(episodes)))
    return tuple(tasks)
