"""JSON schemas and grammars that a turn obeys."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling
from treadle_rollout.adapters.transformers_engine.grammar import Grammars
from treadle_rollout.conformance.tiny_model import TinyModel, tiny_config
from treadle_rollout.ports import GenerationRequest

pytest.importorskip("llguidance")
pytestmark = pytest.mark.processes

MARKERS = ("<end>", "<marker>")
TAG = "<tag>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def obeys(value: Any) -> bool:
    return value.keys() == {"a", "b"} and value["a"] in (True, False) and value["b"] in ("x", "yy")


def bytes_tokenizer(path: Path) -> Tokenizer:
    """One token a byte, and the markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in MARKERS])
    tokenizer.add_tokens([AddedToken(TAG, special=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


def characters_tokenizer(path: Path) -> Tokenizer:
    """One token a character, joined as they stand."""
    alphabet = [*'{}[]":, \n0123456789.-+eE_\\/', *"abcdfghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in MARKERS])
    tokenizer.add_tokens([AddedToken(TAG, special=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


@pytest.mark.parametrize("make", [bytes_tokenizer, characters_tokenizer])
async def test_every_turn_obeys_its_schema_and_others_are_left_alone(
    make: Any, tmp_path: Path
) -> None:
    config = tiny_config()
    config.vocab_size = 300
    subject = TinyModel(config, tmp_path)
    tokenizer = make(tmp_path)
    end = tokenizer.token_to_id("<end>")
    engine = subject.engine(slots=4, max_context=160, stop_tokens=(end,))
    assert "schema" in engine.samplings
    engine.arrival[:] = subject.weights(1)
    await engine.install(1)
    prompt = np.array([1, 2, 3], np.int32)
    for number in range(3):
        sampling = Sampling(1.0, 120, schema=SCHEMA)
        turn = await engine.generate(GenerationRequest(f"s{number}", prompt, sampling))
        if turn.length:  # white space is allowed for as long as there is room
            continue
        said = tokenizer.decode(turn.token_ids[:-1].tolist())
        assert obeys(json.loads(said))
        fresh = subject.logprobs(1, np.concatenate([prompt, turn.token_ids]), 1.0)[2:]
        assert np.all(turn.logprobs >= fresh - 1e-4)
        assert turn.logprobs.sum() > fresh.sum() + 1
    plain = await engine.generate(GenerationRequest("p", prompt, Sampling(1.0, 20)))
    fresh = subject.logprobs(1, np.concatenate([prompt, plain.token_ids]), 1.0)[2:]
    assert np.allclose(plain.logprobs, fresh, atol=1e-4)
    await engine.close()


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"type": "nonsense"}, id="no-schema"),
        pytest.param({"not": {"type": "string"}}, id="not-supported"),
        pytest.param({"$ref": "http://127.0.0.1/x"}, id="elsewhere"),
        pytest.param({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, id="circular"),
        pytest.param({"enum": ["x" * 270_000]}, id="too-long"),
        pytest.param(json.loads('{"items":' * 80 + "{}" + "}" * 80), id="too-deep"),
        pytest.param(
            {"type": "integer", "multipleOf": 1234567, "minimum": -(10**17), "maximum": 10**17},
            id="takes-for-ever",
        ),
    ],
)
async def test_what_cannot_be_followed_is_refused_in_time(schema: Any, tmp_path: Path) -> None:
    end = bytes_tokenizer(tmp_path).token_to_id("<end>")
    grammars = Grammars(tmp_path, frozenset({end}), 300)
    with pytest.raises(InvalidFieldError) as caught:
        await grammars.follower(Sampling(schema=schema))
    assert caught.value.field == "schema"


def test_without_a_token_that_ends_a_turn_there_are_no_schemas(tmp_path: Path) -> None:
    bytes_tokenizer(tmp_path)
    assert not Grammars(tmp_path, frozenset(), 300).available
    assert not Grammars(tmp_path / "none", frozenset({1}), 300).available


@pytest.mark.parametrize("make", [bytes_tokenizer, characters_tokenizer])
async def test_every_turn_obeys_its_grammar(make: Any, tmp_path: Path) -> None:
    config = tiny_config()
    config.vocab_size = 300
    subject = TinyModel(config, tmp_path)
    tokenizer = make(tmp_path)
    end, marker = (tokenizer.token_to_id(each) for each in ("<end>", "<marker>"))
    engine = subject.engine(slots=4, max_context=160, stop_tokens=(end,))
    engine.arrival[:] = subject.weights(1)
    await engine.install(1)
    prompt = np.array([1, 2, 3], np.int32)
    grammar = f'start: "call " ("a" | "b") <[{marker}]> %json {json.dumps(SCHEMA)}'
    for number in range(3):
        sampling = Sampling(1.0, 120, grammar=grammar)
        turn = await engine.generate(GenerationRequest(f"s{number}", prompt, sampling))
        said = tokenizer.decode(turn.token_ids.tolist(), skip_special_tokens=False)
        called, _, arguments = said.partition("<marker>")
        assert called in ("call a", "call b")
        if not turn.length:
            assert obeys(json.loads(arguments.removesuffix("<end>")))
        fresh = subject.logprobs(1, np.concatenate([prompt, turn.token_ids]), 1.0)[2:]
        assert turn.logprobs.sum() > fresh.sum() + 1
    await engine.close()


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        pytest.param(Sampling(grammar="start: nothing"), "grammar", id="no-rule"),
        pytest.param(Sampling(grammar="start: <[999999]>"), "grammar", id="no-token"),
        pytest.param(Sampling(grammar='start: "a"', schema={}), "schema", id="both"),
    ],
)
async def test_what_is_no_grammar_is_refused(
    sampling: Sampling, field: str, tmp_path: Path
) -> None:
    end = bytes_tokenizer(tmp_path).token_to_id("<end>")
    with pytest.raises(InvalidFieldError) as caught:
        await Grammars(tmp_path, frozenset({end}), 300).follower(sampling)
    assert caught.value.field == field


@pytest.mark.parametrize("make", [bytes_tokenizer, characters_tokenizer])
async def test_a_tag_is_no_text(make: Any, tmp_path: Path) -> None:
    tokenizer = make(tmp_path)
    end, tag, quote = (tokenizer.token_to_id(each) for each in ("<end>", TAG, '"'))
    grammars = Grammars(tmp_path, frozenset({end}), 300)
    grammar = f'start: <[{tag}]> %json {{"type": "string"}} <[{tag}]>'
    follower = await grammars.follower(Sampling(grammar=grammar))
    assert follower is not None
    for token, others in ((tag, [quote, end]), (quote, [tag, end]), (quote, [tag, end])):
        allowed = follower.allowed()
        assert allowed[token]
        assert not allowed[others].any()
        follower.take(token)
    assert follower.allowed()[tag]
