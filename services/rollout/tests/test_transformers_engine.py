import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3MoeConfig,
)

from treadle_core.errors import InvalidFieldError
from treadle_core.tickets import Sampling
from treadle_rollout import conformance
from treadle_rollout.adapters.transformers_engine.engine import TransformersEngine
from treadle_rollout.conformance.tiny_model import SHAPE, VOCABULARY, TinyModel, tiny_config
from treadle_rollout.core.errors import EngineBrokenError, UnsupportedModelError
from treadle_rollout.ports import GenerationRequest

SHALLOW = SHAPE | {"num_hidden_layers": 1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": tiny_config,
    "qwen2-tied": lambda: Qwen2Config(**SHALLOW, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SHALLOW, tie_word_embeddings=False),
    "qwen3-moe": lambda: Qwen3MoeConfig(
        **SHALLOW,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        tie_word_embeddings=False,
    ),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=2048,
        n_embd=32,
        n_layer=1,
        n_head=4,
        initializer_range=0.3,
        tie_word_embeddings=False,
    ),
}


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    made: dict[str, TinyModel] = {}

    def subject(name: str) -> TinyModel:
        if name not in made:
            made[name] = TinyModel(CONFIGS[name](), tmp_path_factory.mktemp(name))
        return made[name]

    return subject


EACH = [
    conformance.checks.logprobs_are_those_of_a_fresh_forward,
    conformance.checks.a_swap_leaves_nothing_of_the_old_weights,
]
"""What depends on the model."""
MIXED = [
    conformance.checks.sessions_never_mix,
    conformance.checks.a_logprob_that_is_not_finite_fails_its_call_alone,
]
"""What a model could break whose tokens meet elsewhere than in attention."""


@pytest.mark.component
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conforms(check: conformance.Check, subjects: Callable[[str], TinyModel]) -> None:
    await conformance.run(check, subjects("qwen3"))


@pytest.mark.component
@pytest.mark.parametrize(
    ("check", "model"),
    [(check, name) for name in CONFIGS if name != "qwen3" for check in EACH]
    + [(check, "qwen3-moe") for check in MIXED],
)
async def test_other_models_conform(
    check: conformance.Check, model: str, subjects: Callable[[str], TinyModel]
) -> None:
    await conformance.run(check, subjects(model))


async def run_where_it_applies(check: conformance.Check, subject: TinyModel) -> None:
    """Tied embeddings are poisoned for every token at once: there is nothing to check."""
    alone = conformance.checks.a_logprob_that_is_not_finite_fails_its_call_alone
    if subject.tied and check is alone:
        with pytest.raises(conformance.NotApplicableError):
            await conformance.run(check, subject)
    else:
        await conformance.run(check, subject)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", [name for name in CONFIGS if name != "qwen3-moe"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conforms_with_cuda_graphs(
    check: conformance.Check, model: str, tmp_path: Path
) -> None:
    await run_where_it_applies(check, TinyModel(CONFIGS[model](), tmp_path, "cuda"))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        pytest.param(
            lambda: MambaConfig(
                vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4
            ),
            "differ",
            id="no-attention",
        ),
        pytest.param(
            lambda: MistralConfig(**SHAPE, sliding_window=8), "window of 8", id="sliding-window"
        ),
        pytest.param(
            lambda: Gemma2Config(**SHAPE, head_dim=16, attn_logit_softcapping=1.0),
            "soft cap",
            id="soft-cap",
        ),
        pytest.param(
            lambda: LlamaConfig(
                **SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
            ),
            "rope_type dynamic",
            id="rotation-depends-on-the-batch",
        ),
    ],
)
def test_a_model_that_the_packed_cache_cannot_serve_is_refused(
    config: Callable[[], Any], why: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=why):
        TransformersEngine(tmp_path, 32, 2, stop_tokens=())


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        pytest.param({"max_context": 4096}, "engine.max_context", id="context-beyond-positions"),
        pytest.param({"max_context": 1}, "engine.max_context", id="context-without-room"),
        pytest.param({"slots": 0}, "engine.slots", id="no-slots"),
        pytest.param({"dtype": "int8"}, "engine.dtype", id="dtype"),
        pytest.param({"model": "nowhere"}, "engine.model", id="no-folder"),
        pytest.param({"stop_tokens": (VOCABULARY,)}, "engine.stop_tokens", id="stop-outside"),
        pytest.param({"stop_tokens": None}, "engine.stop_tokens", id="nothing-ends-a-turn"),
    ],
)
def test_arguments_outside_their_limits_name_their_field(
    arguments: dict[str, Any], field: str, subjects: Callable[[str], TinyModel]
) -> None:
    given = {"model": subjects("gpt2").folder, "max_context": 32, "slots": 2, "stop_tokens": ()}
    with pytest.raises(InvalidFieldError) as caught:
        TransformersEngine(**(given | arguments))
    assert caught.value.field == field


async def test_stop_tokens_come_from_the_folder_or_by_name(
    subjects: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    subjects("qwen3").model.save_pretrained(tmp_path)
    vocabulary = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="t0")),  # noqa: S106
        eos_token="t5",  # noqa: S106
    )
    tokenizer.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[2, 3]).save_pretrained(tmp_path)
    for stop_tokens, expected in ((None, {2, 3, 5}), (("t9", 4), {9, 4}), ((), set())):
        engine = TransformersEngine(tmp_path, 32, 1, stop_tokens=stop_tokens)
        assert engine.stop_token_ids == expected
        await engine.close()
    with pytest.raises(InvalidFieldError, match="nothing"):
        TransformersEngine(tmp_path, 32, 1, stop_tokens=("nothing",))


@pytest.mark.parametrize("broken", ["_decoder._slots", "_policy._pairs"])
async def test_a_decoding_thread_that_dies_fails_every_call_and_hangs_none(
    broken: str, subjects: Callable[[str], TinyModel]
) -> None:
    engine = subjects("qwen3").engine(slots=1, max_context=2048)
    request = GenerationRequest("a", np.ones(3, np.int32), Sampling(1.0, 2000))
    part, name = broken.split(".")
    setattr(getattr(engine, part), name, None)
    async with asyncio.timeout(20):
        calls = [asyncio.create_task(engine.generate(request)) for _ in range(3)]
        calls.append(asyncio.create_task(engine.install(1)))
        for call in calls:
            with pytest.raises(EngineBrokenError):
                await call
        with pytest.raises(EngineBrokenError):
            await engine.generate(request)
        with pytest.raises(EngineBrokenError):
            await engine.install(2)
        await engine.close()


async def test_a_cancelled_install_still_waits_for_the_copy(
    subjects: Callable[[str], TinyModel],
) -> None:
    subject = subjects("qwen3")
    engine = subject.engine(slots=1, max_context=32)
    engine.arrival[:] = subject.weights(1)
    installing = asyncio.create_task(engine.install(1))
    await asyncio.sleep(0)
    installing.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([installing])
    assert installing.cancelled()
    assert engine.served_version == 1
    await engine.close()


async def test_a_bfloat16_engine_speaks_bfloat16(subjects: Callable[[str], TinyModel]) -> None:
    engine = TransformersEngine(subjects("llama").folder, 32, 2, dtype="bfloat16", stop_tokens=())
    assert {rectangle.dtype for rectangle in engine.layout.rectangles} == {"bfloat16"}
    await engine.install(1)
    turn = await engine.generate(GenerationRequest("a", np.ones(3, np.int32), Sampling(1.0, 5)))
    assert turn.token_ids.size == 5
    await engine.close()
