from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from treadle_core.episodes import Episode, Group, Termination
from treadle_trainer.adapters.packed_attention import UnsupportedModelError
from treadle_trainer.adapters.single import SingleBackend
from treadle_trainer.core import logprobs as logprobs_module
from treadle_trainer.core.advantages.grpo import Grpo
from treadle_trainer.core.losses import Tokens
from treadle_trainer.core.losses.ppo_clip import PpoClip
from treadle_trainer.core.packing import Example, lay_out, pack
from treadle_trainer.core.step import NonFiniteStepError, StepSettings, train_step, update

on_cpu = partial(SingleBackend, device="cpu")
ARCHITECTURES = ["qwen3", "llama", "gpt2", "sliding"]


@cache
def reference(folder):
    """The model with its own attention."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def reference_logprobs(folder, example):
    """Straight from the formula, one segment alone."""
    tokens = torch.from_numpy(example.token_ids).long()
    with torch.no_grad():
        logits = reference(folder)(tokens[None]).logits[0] / example.temperature
    rows = np.flatnonzero(example.trained)
    return logits.log_softmax(-1)[rows - 1, tokens[rows]]


def gradient(backend):
    return {name: p.grad.clone() for name, p in backend._parameters.items()}


def accumulate(backend, examples, microbatch_tokens):
    """The gradient of one step, without the step."""
    num_tokens = sum(example.num_trained for example in examples)
    for microbatch in pack(examples, max_tokens=microbatch_tokens):
        found, _ = backend.logprobs(microbatch)
        arrays = (microbatch.logprobs, microbatch.advantages, microbatch.owners)
        recorded, advantages, segments = map(torch.from_numpy, arrays)
        mask = torch.ones_like(found, dtype=torch.bool)
        losses = PpoClip(0.2, 0.28)(Tokens(found, recorded, advantages, mask, segments)).losses
        (losses.sum() / num_tokens).backward()
    found = gradient(backend)
    backend._optimizer.zero_grad()
    return found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_or_alone_log_probabilities_are_those_of_the_model_at_the_temperature(
    policies, architecture, make_examples
):
    backend = on_cpu(policies[architecture])
    examples = make_examples(np.random.default_rng(2), 5)
    with torch.no_grad():
        packed, _ = backend.logprobs(lay_out(examples))
        alone = [backend.logprobs(lay_out([example]))[0] for example in examples]
    wanted = [reference_logprobs(policies[architecture], example) for example in examples]
    torch.testing.assert_close(packed, torch.cat(wanted), rtol=0, atol=2e-5)
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens_a_chunk", [1, 3])
def test_chunks_change_neither_log_probabilities_nor_gradient(
    policy, make_examples, monkeypatch, tokens_a_chunk
):
    backend = on_cpu(policy)
    examples = make_examples(np.random.default_rng(3), 4)
    wanted = accumulate(backend, examples, 1000)
    monkeypatch.setattr(logprobs_module, "CHUNK_ELEMENTS", tokens_a_chunk * backend.vocab_size)
    torch.testing.assert_close(accumulate(backend, examples, 1000), wanted)


@pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance"),
    [("qwen3", torch.float32, 1e-5), ("gpt2", torch.float64, 1e-10)],
    ids=["fp32", "fp64"],
)
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(
    policies, architecture, make_examples, dtype, tolerance
):
    backend = on_cpu(policies[architecture])
    backend._model.to(dtype)
    rng = np.random.default_rng(4)
    lengths = [24, 24, 24, 24, 9, 12, 15, 18]
    examples = [make_examples(rng, 1, longest=length)[0] for length in lengths]
    splits = {size: accumulate(backend, examples, size) for size in (24, 50, 1000)}
    counts = {size: len(pack(examples, max_tokens=size)) for size in splits}
    assert counts[1000] == 1
    assert counts[24] > counts[50] > 1
    for size in (24, 50):
        for name, wanted in splits[1000].items():
            torch.testing.assert_close(
                splits[size][name].to(dtype), wanted.to(dtype), rtol=tolerance, atol=tolerance
            )


def test_a_step_without_anything_to_learn_changes_no_parameter(policy, make_group):
    backend = on_cpu(policy)
    before = {name: p.clone() for name, p in backend.parameters().items()}
    groups = [make_group(np.random.default_rng(0), [1.0] * 4)]
    result = step(backend, groups)
    assert result.num_trained == 0
    assert result.loss == result.grad_norm == 0
    torch.testing.assert_close(dict(backend.parameters()), before, rtol=0, atol=0)


def test_a_group_of_equal_rewards_does_not_change_the_step_of_the_others(policy, make_group):
    rng = np.random.default_rng(6)
    telling, silent = make_group(rng, [1.0, 0.0, 0.0, 1.0]), make_group(rng, [1.0] * 4)
    ungraded = Group("none", make_group(rng, [None] * 3).episodes)
    first, second = on_cpu(policy), on_cpu(policy)
    alone = step(first, [telling])
    together = step(second, [telling, silent, ungraded])
    assert replace(together, num_silent=0) == alone
    assert together.num_silent == 2
    torch.testing.assert_close(dict(first.parameters()), dict(second.parameters()), rtol=0, atol=0)


def step(backend, groups, learning_rate=1e-3):
    return train_step(
        backend,
        groups,
        advantage=Grpo(),
        loss=PpoClip(),
        settings=StepSettings(microbatch_tokens=128, max_grad_norm=1.0),
        learning_rate=learning_rate,
    )


def test_steps_raise_the_probability_of_what_was_rewarded(policy, make_segment):
    backend = on_cpu(policy)
    rng = np.random.default_rng(7)
    episodes = []
    for reward in (1.0, 0.0):
        example = Example.of(make_segment(rng), 0.0)
        with torch.no_grad():
            found, _ = backend.logprobs(lay_out([example]))
        recorded = np.zeros(example.num_tokens, np.float32)
        recorded[example.trained] = found
        segment = make_segment(rng, token_ids=example.token_ids, logprobs=recorded)
        episodes.append(Episode((segment,), reward, Termination.FINISHED))
    group = Group("task", tuple(episodes))
    before = [mean_logprob(backend, episode) for episode in episodes]
    for _ in range(3):
        step(backend, [group])
    after = [mean_logprob(backend, episode) for episode in episodes]
    assert after[0] > before[0]
    assert after[1] < before[1]


def mean_logprob(backend, episode):
    with torch.no_grad():
        return float(backend.logprobs(lay_out([Example.of(episode.segments[0], 0.0)]))[0].mean())


@pytest.mark.parametrize("poison", ["parameter", "gradient"])
def test_a_step_that_is_no_number_is_refused_before_a_parameter_changes(
    policy, make_examples, poison
):
    backend = on_cpu(policy)
    if poison == "parameter":
        with torch.no_grad():
            backend._parameters["lm_head.weight"][2, 0] = torch.inf
    else:
        backend._parameters["lm_head.weight"].register_hook(lambda grad: grad * torch.nan)
    before = {name: p.clone() for name, p in backend.parameters().items()}
    with pytest.raises(NonFiniteStepError) as raised:
        update(
            backend,
            make_examples(np.random.default_rng(8), 3),
            loss=PpoClip(),
            settings=StepSettings(1000, 1.0),
            learning_rate=1e-3,
        )
    assert raised.value.field in ("loss", "grad_norm")
    assert raised.value.value == "nan"
    torch.testing.assert_close(dict(backend.parameters()), before, rtol=0, atol=0, equal_nan=True)


def test_a_saved_policy_loads_as_it_was_and_starts_with_a_fresh_optimizer(
    policy, make_examples, tmp_path
):
    backend = on_cpu(policy)
    examples = make_examples(np.random.default_rng(9), 4)
    settings = StepSettings(1000, 1.0)
    update(backend, examples, loss=PpoClip(), settings=settings, learning_rate=1e-2)
    backend.save_policy(tmp_path)
    backend.save_optimizer(tmp_path)
    loaded = on_cpu(tmp_path)
    torch.testing.assert_close(
        dict(loaded.parameters()), dict(backend.parameters()), rtol=0, atol=0
    )
    assert not loaded._optimizer.state
    assert (tmp_path / "tokenizer.json").read_bytes() == (policy / "tokenizer.json").read_bytes()
    assert "treadle" not in (tmp_path / "config.json").read_text()
    AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weight_decay_applies_to_matrices_alone(policy):
    backend = on_cpu(policy, weight_decay=0.1)
    for group in backend._optimizer.param_groups:
        dimensions = {parameter.ndim >= 2 for parameter in group["params"]}
        assert dimensions == {group["weight_decay"] > 0}


def test_a_model_class_whose_attention_is_not_plain_is_refused(tmp_path):
    config = Gemma2Config(
        vocab_size=24,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=32,
        attn_logit_softcapping=50.0,
        bos_token_id=None,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="softcap"):
        on_cpu(tmp_path)
