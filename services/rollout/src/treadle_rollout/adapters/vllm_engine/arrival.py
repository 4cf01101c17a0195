"""Where versions arrive: memory that vLLM's workers read, laid out as the trainer sends them."""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from treadle_core.errors import InvalidFieldError
from treadle_rollout.adapters.vllm_engine.worker import Place
from treadle_rollout.core.errors import UnsupportedModelError
from treadle_weights.layouts import Layout, whole

_DTYPES = ("float32", "bfloat16", "float16")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Under these names configurations say how many experts a layer has."""


class Policy:
    """What the model folder says of the policy, without its weights."""

    def __init__(self, folder: Path, *, arrival_dtype: str) -> None:
        """Raises InvalidFieldError, or UnsupportedModelError for a mixture of experts."""
        if arrival_dtype not in _DTYPES:
            limit = " | ".join(_DTYPES)
            raise InvalidFieldError("engine.arrival_dtype", limit=limit, value=arrival_dtype)
        if not (folder / "config.json").is_file():
            raise InvalidFieldError("engine.model", limit="a model folder", value=folder)
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text: Any = config.get_text_config()
        if any(getattr(text, name, None) for name in _EXPERTS):
            # The trainer's fused experts are not the checkpoint's names, and on the CPU vLLM's
            # reload leaves the experts in the wrong form.
            raise UnsupportedModelError(str(folder), "experts cannot be replaced while it serves")
        self.vocabulary = int(text.vocab_size)
        self.positions = int(getattr(text, "max_position_embeddings", 0) or 2**31 - 1)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        named = cast("Iterable[tuple[str, torch.Tensor]]", model.named_parameters())
        shapes = {name: (arrival_dtype, tuple(tensor.shape)) for name, tensor in named}
        self.layout: Layout = whole(shapes)
        """The named parameters, tied ones once, in the model's order."""


class Arrival:
    """Bytes of `layout`, shared with other processes until they are unlinked, and kept after."""

    def __init__(self, layout: Layout) -> None:
        self.size = layout.size()
        self.places: list[Place] = [
            (each.tensor, each.dtype, list(each.shape), each.offset) for each in layout.rectangles
        ]
        self._descriptor = os.memfd_create("treadle-arrival")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        """Where other processes of this user find it: it has no name that could be left behind."""
        try:
            os.posix_fallocate(self._descriptor, 0, self.size)
            memory = mmap.mmap(self._descriptor, self.size)
        except BaseException:
            self.unlink()
            raise
        self.bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    def unlink(self) -> None:
        """Nobody finds it any more: the memory goes with the last process that has it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
