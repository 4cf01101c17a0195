"""The model: loaded from a folder, asked for logits, given new weights."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from treadle_core.errors import InvalidFieldError
from treadle_rollout.adapters.transformers_engine.attention import (
    ATTENTION,
    DeviceBatch,
    KeyValueCache,
    flat_indices,
)
from treadle_rollout.adapters.transformers_engine.batch import Batch
from treadle_rollout.adapters.transformers_engine.graphs import DecodingGraphs
from treadle_rollout.core.errors import UnsupportedModelError
from treadle_weights.layouts import Layout, whole

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_CONTEXT_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that change for a whole batch with its longest sequence."""


class Policy:
    """A causal language model whose parameters are replaced while it serves.

    Args:
        folder: Hugging Face model folder; nothing is downloaded and none of its code is run.
        dtype: of the parameters, the cache and the arithmetic: float32, bfloat16 or float16.
        device: torch device.
        slots: sequences in the cache.
        max_context: most tokens of a sequence.

    Raises:
        InvalidFieldError: `dtype` or `max_context` is outside what the model can do.
        UnsupportedModelError: the model's forward cannot work on the packed cache.
    """

    def __init__(
        self, folder: Path, *, dtype: str, device: str, slots: int, max_context: int
    ) -> None:
        if dtype not in _DTYPES:
            raise InvalidFieldError("engine.dtype", limit=" | ".join(_DTYPES), value=dtype)
        if not (folder / "config.json").is_file():
            raise InvalidFieldError("engine.model", limit="a model folder", value=folder)
        self.name = str(folder)
        self._device = torch.device(device)
        # The plain attention of the model itself, as reference until `serve_packed`.
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=_DTYPES[dtype], local_files_only=True, attn_implementation="eager"
        )
        self.model.to(self._device).eval().requires_grad_(requires_grad=False)
        self._check_context(max_context)
        self.cache = KeyValueCache(slots, max_context)
        self._graphs: DecodingGraphs | None = None
        parameters = dict(cast("Iterable[tuple[str, Tensor]]", self.model.named_parameters()))
        self.layout: Layout = whole(
            {name: (dtype_name(p.dtype), tuple(p.shape)) for name, p in parameters.items()}
        )
        self._buffer = torch.zeros(
            self.layout.size(0), dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        self.arrival: NDArray[np.uint8] = self._buffer.numpy()
        self._pairs = [
            (parameters[r.tensor], self._arrived(parameters[r.tensor], r.offset))
            for r in self.layout.rectangles
        ]

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self._device

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    def install(self) -> None:
        """Copies `arrival` into the parameters, wholly, and zeroes the cache."""
        for parameter, source in self._pairs:
            parameter.copy_(source, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.cache.clear()

    def serve_packed(self) -> None:
        """Turns from the model's own attention to the one over the cache."""
        self.model.set_attn_implementation(ATTENTION)

    def capture(self) -> None:
        """From now on, batches that feed one token a slot are replayed as CUDA graphs."""
        self._graphs = DecodingGraphs(self._forward, self.cache, self._device)

    def logits(self, batch: Batch) -> Tensor:
        """One forward; fills the cache. Returns logits of the batch's last tokens, [M, V]."""
        if self._graphs is not None and DecodingGraphs.take(batch):
            return self._graphs.logits(batch)
        indices = torch.from_numpy(flat_indices(batch)).to(self._device, non_blocking=True)
        return self._forward(DeviceBatch(batch, self.cache, indices))

    def plain_logits(self, token_ids: NDArray[np.int64]) -> Tensor:
        """Logits after a whole sequence [T] by the model's own attention, [V]."""
        ids = torch.from_numpy(token_ids)[None].to(self._device)
        return self.model(input_ids=ids, use_cache=False).logits[0, -1]

    def _forward(self, batch: DeviceBatch) -> Tensor:
        return self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.last,
            slot_batch=batch,
        ).logits[0]

    def _arrived(self, parameter: Tensor, offset: int) -> Tensor:
        size = parameter.numel() * parameter.element_size()
        return self._buffer[offset : offset + size].view(parameter.dtype).view(parameter.shape)

    def _check_context(self, max_context: int) -> None:
        config = self.model.config
        limit = getattr(config, "max_position_embeddings", None)
        if max_context < 2 or (limit is not None and max_context > limit):
            raise InvalidFieldError("engine.max_context", limit=f"2 to {limit}", value=max_context)
        rope: Any = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") in _CONTEXT_DEPENDENT_ROPE:
            raise UnsupportedModelError(self.name, f"rope_type {rope['rope_type']}")


def dtype_name(dtype: torch.dtype) -> str:
    """As layouts spell it: float32, bfloat16, float16."""
    return str(dtype).removeprefix("torch.")
