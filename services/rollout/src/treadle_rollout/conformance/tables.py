"""The subject `scripted`: random tables of bigrams, one a version. No model, and no torch."""

import numpy as np
from numpy.typing import NDArray

from treadle_rollout.adapters.scripted import ScriptedEngine
from treadle_rollout.conformance.subject import Ids
from treadle_rollout.ports import Engine


class Tables:
    """Shapes: V = vocabulary, T = tokens."""

    vocabulary = 16
    has_model = False

    def engine(
        self, *, slots: int, max_context: int, stop_tokens: tuple[int, ...] = (), seed: int = 0
    ) -> Engine:
        return ScriptedEngine(
            max_context=max_context,
            slots=slots,
            seed=seed,
            vocabulary=self.vocabulary,
            stop_tokens=stop_tokens,
        )

    def table(self, version: int) -> NDArray[np.float32]:
        """The logits of a token by the token before it, [V, V]."""
        rng = np.random.default_rng(version)
        return rng.normal(size=(self.vocabulary, self.vocabulary)).astype(np.float32)

    def weights(self, version: int) -> NDArray[np.uint8]:
        return self.table(version).reshape(-1).view(np.uint8)

    def poisoned(self) -> tuple[NDArray[np.uint8], int]:
        table = self.table(1)
        table[7] = np.nan
        return table.reshape(-1).view(np.uint8), 7

    def logprobs(self, version: int, token_ids: Ids, temperature: float) -> NDArray[np.float32]:
        logits = self.table(version)[token_ids[:-1]] / temperature
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        return np.take_along_axis(logprobs, token_ids[1:, None], 1)[:, 0]

    def logits(self, version: int, token_ids: Ids) -> NDArray[np.float32]:
        return self.table(version)[token_ids[-1]]
