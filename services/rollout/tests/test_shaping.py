"""Sampling of many rows at once, against the plain account of one."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import SHAPES, Sampling
from treadle_rollout.adapters.transformers_engine.sampling import sample
from treadle_rollout.adapters.transformers_engine.shaping import Drawn, Shape
from treadle_rollout.core.requests import check_request
from treadle_rollout.core.shaping import logprobs_of
from treadle_rollout.ports import GenerationRequest

VOCABULARY = 12
PROMPT = np.array([0, 1, 2, 3], np.int32)
TURN = [3, 4, 4]
DRAWS = 3000

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0, "logit_bias": {7: 9.0}},
    "top_k": {"top_k": 4, "temperature": 0.7},
    "top_k-beyond": {"top_k": 400},
    "top_p": {"top_p": 0.6, "temperature": 1.3},
    "top_p-nothing": {"top_p": 0.0},
    "min_p": {"min_p": 0.3},
    "bias": {"logit_bias": {0: -100.0, 5: 3.0}},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": -0.8},
    "repetition": {"repetition_penalty": 1.5},
    "all": {
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.02,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {9: 1.5},
    },
}


def logits_of(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCABULARY) * 2).float()


def drawn(sampling: Sampling, row: int) -> Drawn:
    known = np.concatenate([PROMPT, TURN]).astype(np.int64)
    return Drawn(row, Shape(sampling), known, PROMPT.size)


@pytest.mark.parametrize("case", CASES)
def test_samples_and_their_logprobs_are_of_one_distribution(case: str) -> None:
    sampling = Sampling(**CASES[case])
    logits = logits_of(3)
    expected = logprobs_of(logits.double().numpy(), sampling, PROMPT, TURN)

    token_ids, logprobs = sample(
        logits.repeat(DRAWS, 1),
        np.full(DRAWS, sampling.temperature, np.float32),
        torch.Generator().manual_seed(1),
        [drawn(sampling, row) for row in range(DRAWS)] if sampling.shaped else (),
    )

    assert np.allclose(logprobs, expected[token_ids], atol=1e-5)
    if sampling.temperature == 0:
        assert set(token_ids.tolist()) == {7}
        return
    share = np.bincount(token_ids, minlength=VOCABULARY) / DRAWS
    wanted = np.exp(expected)
    assert np.all(share[wanted == 0] == 0)
    assert np.all(np.abs(share - wanted) <= 4.5 * np.sqrt(wanted * (1 - wanted) / DRAWS) + 1e-9)


@settings(max_examples=40, deadline=None)
@given(st.permutations(list(CASES)), st.integers(0, 10_000))
def test_rows_of_a_batch_are_shaped_each_as_if_alone(order: list[str], seed: int) -> None:
    samplings = [Sampling(**CASES[case]) for case in order]
    logits = torch.stack([logits_of(seed + row) for row in range(len(order))])
    temperatures = np.array([sampling.temperature for sampling in samplings], np.float32)
    shaped = [drawn(s, row) for row, s in enumerate(samplings) if s.shaped]
    before = logits.clone()

    token_ids, logprobs = sample(logits, temperatures, torch.Generator().manual_seed(seed), shaped)

    assert torch.equal(logits, before)
    for row, sampling in enumerate(samplings):
        own = logprobs_of(logits[row].double().numpy(), sampling, PROMPT, TURN)
        assert np.isclose(logprobs[row], own[token_ids[row]], atol=1e-5)


def test_a_seed_is_a_calls_own_chance_whatever_is_sampled_beside_it() -> None:
    def tokens(rows: int, seed: int) -> list[int]:
        shape = Shape(Sampling(seed=seed))
        found: list[int] = []
        for step in range(12):
            each = Drawn(rows - 1, shape, np.arange(4), 4)
            logits = logits_of(step).repeat(rows, 1)
            generator = torch.Generator().manual_seed(rows)
            ids, _ = sample(logits, np.ones(rows, np.float32), generator, [each])
            found.append(int(ids[-1]))
        return found

    assert tokens(1, 5) == tokens(7, 5) != tokens(1, 6)


def test_a_sampling_says_which_of_its_fields_are_not_off() -> None:
    assert Sampling(0.3, 5).shaped == frozenset()
    assert Sampling(schema={}).shaped == {"schema"}
    assert Sampling(seed=0, top_p=0.5).shaped == {"seed", "top_p"}
    assert hash(Sampling(logit_bias={1: 2.0})) is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", float("nan")),
        ("top_k", -1),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", dict.fromkeys(range(2000), 1.0)),
    ],
)
def test_what_is_outside_its_limits_names_its_field(field: str, value: object) -> None:
    fields: dict[str, Any] = {field: value}
    request = GenerationRequest("s", PROMPT, Sampling(**fields))
    with pytest.raises(InvalidFieldError) as caught:
        check_request(request, vocabulary=4000, max_context=100, samplings=SHAPES)
    assert caught.value.field == field
