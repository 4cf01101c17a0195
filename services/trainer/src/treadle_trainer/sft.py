"""`treadle sft RECIPE`: trains a policy on demonstrations, on the tokens that it is to say."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from treadle_core.errors import InvalidFieldError, TreadleError
from treadle_runtime import config as configuration
from treadle_runtime import plugins
from treadle_runtime.measures import Measure, report
from treadle_trainer.adapters import folders, single
from treadle_trainer.config import SftConfig, SftModelConfig
from treadle_trainer.core.demonstrations import Demonstration, Demonstrations
from treadle_trainer.core.losses.nll import NegativeLogLikelihood
from treadle_trainer.core.packing import Example
from treadle_trainer.core.schedule import Schedule
from treadle_trainer.core.step import StepSettings, update
from treadle_trainer.ports import Backend

_LINES = 20
"""Lines of progress that a run prints."""


def main(argv: list[str]) -> int:
    """The command. Prints progress, and a JSON line a measure at the end; returns the status."""
    parser = argparse.ArgumentParser("treadle sft", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value")
    args = parser.parse_args(argv)
    config = configuration.load(SftConfig, ["--config", str(args.recipe), *args.overrides])
    try:
        measures = run(config)
    except (TreadleError, plugins.PluginError) as error:
        sys.stderr.write(f"treadle sft: {error}\n")
        return 1
    return report(measures)


def run(config: SftConfig) -> list[Measure]:
    """Trains as the recipe says and installs the folder; returns what it measured."""
    demonstrations: Demonstrations = plugins.build("treadle.demonstrations", config.demonstrations)
    parent = config.output.resolve().parent
    with folders.aside(parent) as start, folders.aside(parent) as result:
        source = start_folder(config.model, start, config.seed)
        tokenizer = load_tokenizer(source)
        backend: Backend = plugins.build(
            "treadle.backends",
            config.backend,
            folder=source,
            **config.optimizer.backend_parameters,
        )
        began = time.monotonic()
        loss, num_tokens = train(config, backend, tokenizer, demonstrations)
        seconds = time.monotonic() - began
        backend.save_policy(result)
        folders.install(result, config.output.resolve())
    return [
        Measure("sft_loss", loss, "nats a trained token"),
        Measure("sft_seconds", seconds, "s"),
        Measure("sft_tokens_per_s", num_tokens / seconds, "tokens/s"),
    ]


def start_folder(model: SftModelConfig, folder: Path, seed: int) -> Path:
    """Folder of the start parameters: the recipe's, or `folder`, filled with random ones."""
    if model.folder is not None:
        return model.folder
    if model.config is None or model.tokenizer is None:
        raise InvalidFieldError("model", limit="folder, or config and tokenizer", value=model)
    single.copy_tokenizer(model.tokenizer, folder)
    tokenizer: Any = load_tokenizer(folder)
    torch.manual_seed(seed)
    policy = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(model.config, local_files_only=True)
    )
    ends: dict[str, Any] = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    policy.config.update(ends)
    policy.generation_config = GenerationConfig(**ends)
    single.save_model(policy.float(), folder)
    return folder


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a Hugging Face folder."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def train(
    config: SftConfig,
    backend: Backend,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Demonstrations,
) -> tuple[float, int]:
    """Takes all steps; returns the loss of the last ones that were printed, and all tokens."""
    optimizer = config.optimizer
    schedule = Schedule(
        optimizer.learning_rate,
        optimizer.warmup_steps,
        decay_after=int(config.decay_at * config.steps),
        decay_factor=config.decay_factor,
    )
    settings = StepSettings(config.microbatch_tokens, optimizer.max_grad_norm)
    every = max(1, config.steps // _LINES)
    losses: list[float] = []
    mean, num_tokens, began = 0.0, 0, time.monotonic()
    for step in range(1, config.steps + 1):
        first = (step - 1) * config.batch_size
        examples = [
            tokenize(tokenizer, demonstrations.read(index))
            for index in range(first, first + config.batch_size)
        ]
        result = update(
            backend,
            examples,
            loss=NegativeLogLikelihood(),
            settings=settings,
            learning_rate=schedule(step),
        )
        losses.append(result.loss)
        num_tokens += sum(example.num_tokens for example in examples)
        if step % every == 0 or step == config.steps:
            mean, losses = float(np.mean(losses)), []
            seconds = time.monotonic() - began
            sys.stdout.write(f"sft step {step} loss {mean:.4f} seconds {seconds:.1f}\n")
            sys.stdout.flush()
    return mean, num_tokens


def tokenize(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> Example:
    """Tokens of the pieces, one after the other, without special tokens of the tokenizer's own."""
    token_ids: list[int] = []
    trained: list[bool] = []
    for text, is_trained in demonstration.pieces:
        piece: list[int] = tokenizer.encode(text, add_special_tokens=False)
        token_ids += piece
        trained += [is_trained] * len(piece)
    if not token_ids:
        raise InvalidFieldError("pieces", limit="at least one token", value=demonstration.pieces)
    return Example(
        np.array(token_ids, np.int32),
        np.array(trained, np.bool_),
        np.zeros(len(token_ids), np.float32),
    )
