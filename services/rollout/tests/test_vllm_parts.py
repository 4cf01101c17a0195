"""The parts of engine `vllm` that need no vLLM."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import SHAPES, Sampling
from treadle_rollout.adapters.vllm_engine.arrival import Arrival, Policy
from treadle_rollout.adapters.vllm_engine.sampling import (
    check_temperature,
    grammar_of,
    parameters,
)
from treadle_rollout.adapters.vllm_engine.turns import Turn
from treadle_rollout.adapters.vllm_engine.worker import ArrivalWorker
from treadle_rollout.conformance.tiny_model import SHAPE, TinyModel
from treadle_rollout.core.errors import NonFiniteLogprobError, UnsupportedModelError

STOPS = frozenset({1, 3})


def test_every_parameter_is_said_whatever_the_default_of_an_engine() -> None:
    plain = parameters(Sampling(), room=9, stops=STOPS)

    assert plain["max_tokens"] == 9
    assert plain["stop_token_ids"] == [1, 3]
    assert plain["ignore_eos"] is True
    # What has another name, or is no parameter but said otherwise.
    assert plain.keys() >= SHAPES - {"schema", "grammar"} | {"temperature", "n", "min_tokens"}


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"top_p": 0.0}, {"top_p": 1e-6}),
        ({"seed": -1}, {"seed": 2**63 - 1}),
        ({"seed": 2**64 - 1}, {"seed": 2**63 - 1}),
        ({"seed": 0}, {"seed": 0}),
        ({"logit_bias": {3: 1.5}}, {"logit_bias": {3: 1.5}}),
        ({"max_tokens": 4}, {"max_tokens": 4}),
    ],
)
def test_what_vllm_takes_for_something_else_is_said_in_another_way(
    asked: dict[str, Any], said: dict[str, Any]
) -> None:
    given = parameters(Sampling(**asked), room=100, stops=STOPS)

    assert {name: given[name] for name in said} == said


def test_a_temperature_that_vllm_would_raise_is_refused() -> None:
    for temperature in (0.0, 0.01, 1.0):
        check_temperature(Sampling(temperature))

    with pytest.raises(InvalidFieldError) as caught:
        check_temperature(Sampling(0.009))

    assert caught.value.field == "temperature"


def test_a_schema_is_the_grammar_of_its_texts() -> None:
    assert grammar_of(Sampling()) is None
    assert grammar_of(Sampling(grammar='start: "a"')) == 'start: "a"'
    assert grammar_of(Sampling(schema={})) == 'start: %json {"type": "object"}'


def test_a_turn_stamps_each_token_with_what_was_served_when_it_came() -> None:
    turn = Turn(4, STOPS)
    turn.add([5, 6], [-0.5, -1.0], [7, 7])
    turn.add([8], [-2.0], [9])
    turn.add([1], [-0.25], [10])

    whole = turn.piece(0, last=True)

    assert whole.token_ids.tolist() == [5, 6, 8, 1]
    assert whole.logprobs.tolist() == [-0.5, -1.0, -2.0, -0.25]
    assert whole.policy_version.tolist() == [7, 7, 9, 10]
    assert whole.context_version.tolist() == [7, 7, 9, 10]
    assert not whole.length
    assert turn.piece(0, last=False).length is False
    assert turn.spans() == [(7, 2), (9, 1), (10, 1)]


def test_a_turn_without_a_stop_token_ended_for_its_length() -> None:
    turn = Turn(4, STOPS)
    turn.add([5], [-0.5], [1])

    assert turn.piece(0, last=True).length
    assert not turn.piece(0, last=False).length


@pytest.mark.parametrize("logprobs", [[-0.5, math.nan], [-0.5, -math.inf], [-0.5]])
def test_a_token_without_a_finite_logprob_fails_the_turn(logprobs: list[float]) -> None:
    turn = Turn(4, STOPS)

    with pytest.raises(NonFiniteLogprobError, match=r"version 2 .* position 5"):
        turn.add([5, 6], logprobs, [2, 2])


def _folder(config: Any, path: Path) -> Path:
    config.save_pretrained(path)
    return path


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig])
def test_versions_arrive_under_the_names_that_the_trainer_sends(
    kind: Any, tied: bool, tmp_path: Path
) -> None:
    model = TinyModel(kind(**SHAPE, tie_word_embeddings=tied), tmp_path)

    policy = Policy(tmp_path, arrival_dtype="float32")

    sent = {n: ("float32", tuple(p.shape)) for n, p in model.model.named_parameters()}
    assert policy.layout.tensors == sent
    assert policy.vocabulary == SHAPE["vocab_size"]


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    folder = _folder(Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2), tmp_path)

    with pytest.raises(UnsupportedModelError, match="experts"):
        Policy(folder, arrival_dtype="float32")


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"arrival_dtype": "int8"}, "engine.arrival_dtype"), ({}, "engine.model")],
)
def test_bad_arguments_name_their_field(
    arguments: dict[str, str], field: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        Policy(tmp_path, **{"arrival_dtype": "float32", **arguments})

    assert caught.value.field == field


def test_a_worker_reads_what_is_written_where_versions_arrive(tmp_path: Path) -> None:
    model = TinyModel(Qwen3Config(**SHAPE, tie_word_embeddings=False), tmp_path)
    arrival = Arrival(Policy(tmp_path, arrival_dtype="float32").layout)
    worker: Any = _Worker()
    worker.treadle_map(arrival.path, arrival.size, arrival.places)
    arrival.unlink()
    assert not Path(arrival.path).exists()

    for version in (1, 2):
        arrival.bytes[:] = model.weights(version)
        worker.treadle_install()

        expected = model.parameters(version)
        assert worker.loaded.keys() == expected.keys()
        for name, tensor in expected.items():
            assert np.array_equal(worker.loaded[name].numpy(), tensor.detach().numpy()), name


class _Worker(ArrivalWorker):
    """Loads as vLLM's worker does, into a dictionary."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.model_runner = self
        self.device = self
        self.type = "cuda"

    def get_model(self) -> None:
        return None

    def reload_weights(self, weights_iterator: Any) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in weights_iterator}
