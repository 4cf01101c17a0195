"""The subject `vllm`: the tiny model of `transformers`, with heads that vLLM's kernels take."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import Qwen3Config

from treadle_rollout.adapters.vllm_engine.engine import VllmEngine
from treadle_rollout.adapters.vllm_engine.versions import on_cpu
from treadle_rollout.conformance.tiny_model import SHAPE, TinyModel
from treadle_rollout.ports import Engine


def tiny_config(**fields: Any) -> Qwen3Config:
    """Of a model with its own output head, so that one poisoned embedding poisons no other."""
    return Qwen3Config(**{**SHAPE, "head_dim": 32, "tie_word_embeddings": False, **fields})


class VllmModel(TinyModel):
    """A model of `config`, written to `folder`, and vLLM on it; log-probabilities in float32."""

    attention_backend: str | None = None if on_cpu() else "FLEX_ATTENTION"
    """On a GPU one that takes float32."""

    def engine(
        self, *, slots: int, max_context: int, stop_tokens: tuple[int, ...] = (), seed: int = 0
    ) -> Engine:
        return VllmEngine(
            self.folder,
            max_context,
            slots,
            stop_tokens=stop_tokens,
            seed=seed,
            cuda_graphs=False,
            gpu_memory=0.1,
            attention_backend=self.attention_backend,
            cache_bytes=2**28,
        )

    def poisoned(self) -> tuple[NDArray[np.uint8], int] | None:
        """None on a GPU.

        The kernels that take float32 there multiply keys of other calls by zero.
        """
        return super().poisoned() if self.attention_backend is None else None
