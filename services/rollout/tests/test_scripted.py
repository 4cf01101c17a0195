import numpy as np
import pytest
from numpy.typing import NDArray

from treadle_core.tickets import Sampling
from treadle_rollout import conformance
from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.ports import Engine, GenerationRequest

VOCABULARY = 16


class Tables:
    """Random tables of bigrams, one a version."""

    vocabulary = VOCABULARY

    def engine(
        self, *, slots: int, max_context: int, stop_tokens: tuple[int, ...] = (), seed: int = 0
    ) -> Engine:
        return ScriptedEngine(
            max_context=max_context,
            slots=slots,
            seed=seed,
            vocabulary=VOCABULARY,
            stop_tokens=stop_tokens,
        )

    def table(self, version: int) -> NDArray[np.float32]:
        rng = np.random.default_rng(version)
        return rng.normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)

    def weights(self, version: int) -> NDArray[np.uint8]:
        return self.table(version).reshape(-1).view(np.uint8)

    def poisoned(self) -> tuple[NDArray[np.uint8], int]:
        table = self.table(1)
        table[7] = np.nan
        return table.reshape(-1).view(np.uint8), 7

    def logprobs(
        self, version: int, token_ids: NDArray[np.int32], temperature: float
    ) -> NDArray[np.float32]:
        logits = self.table(version)[token_ids[:-1]] / temperature
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return np.take_along_axis(logprobs, token_ids[1:, None], 1)[:, 0]


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
async def test_conforms(check: conformance.Check) -> None:
    await conformance.run(check, Tables())


async def test_a_script_is_said_word_by_word_and_ends_with_its_stop_token() -> None:
    engine = ScriptedEngine(script=lambda session, prompt_tokens: [prompt_tokens, 5, 1])
    await engine.install(1)
    prompt = np.array([4, 4], np.int32)
    made = await engine.generate(GenerationRequest("s", prompt, Sampling(max_tokens=9)))
    assert made.token_ids.tolist() == [2, 5, 1]
    assert np.allclose(made.logprobs, -np.log(64))
    await engine.close()
