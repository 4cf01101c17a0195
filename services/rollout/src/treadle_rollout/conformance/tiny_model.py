"""The subject `transformers`: a random model of a few thousand parameters, and its forward."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import functional_call
from transformers import AutoModelForCausalLM, Qwen3Config

from treadle_rollout.adapters.transformers_engine.engine import TransformersEngine
from treadle_rollout.conformance.subject import Ids
from treadle_rollout.ports import Engine
from treadle_weights.layouts import whole

VOCABULARY = 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
}


def tiny_config() -> Qwen3Config:
    """Of a model with its own output head, so that one poisoned embedding poisons no other."""
    return Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=False)


class TinyModel:
    """A model of `config`, written to `folder`; version v adds noise seeded by v."""

    has_model = True

    def __init__(self, config: Any, folder: Path, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = device
        self.folder = folder
        models: Any = AutoModelForCausalLM
        self.model: Any = models.from_config(config, attn_implementation="eager").eval()
        self.model.save_pretrained(folder)
        self.tied = bool(config.tie_word_embeddings)
        self._versions: dict[int, dict[str, torch.Tensor]] = {}

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    def engine(
        self, *, slots: int, max_context: int, stop_tokens: tuple[int, ...] = (), seed: int = 0
    ) -> Engine:
        return TransformersEngine(
            self.folder,
            max_context,
            slots,
            stop_tokens=stop_tokens,
            seed=seed,
            device=self.device,
        )

    def parameters(self, version: int) -> dict[str, torch.Tensor]:
        """By name, float32."""
        if version not in self._versions:
            generator = torch.Generator().manual_seed(version)
            self._versions[version] = {
                name: value + 0.1 * torch.randn(value.shape, generator=generator)
                for name, value in self.model.named_parameters()
            }
        return self._versions[version]

    def weights(self, version: int) -> NDArray[np.uint8]:
        return self._packed(self.parameters(version))

    def poisoned(self) -> tuple[NDArray[np.uint8], int] | None:
        """None where the embeddings are tied: every token would be poisoned."""
        if self.tied:
            return None
        parameters = dict(self.parameters(1))
        name = next(name for name in parameters if "embed_tokens" in name or "wte" in name)
        parameters[name] = parameters[name].clone()
        parameters[name][7] = torch.nan
        return self._packed(parameters), 7

    @torch.inference_mode()
    def logprobs(self, version: int, token_ids: Ids, temperature: float) -> NDArray[np.float32]:
        logprobs = torch.log_softmax(self._forward(version, token_ids) / temperature, -1)
        following = torch.from_numpy(token_ids[1:, None]).long()
        return logprobs[:-1].gather(1, following)[:, 0].numpy()

    @torch.inference_mode()
    def logits(self, version: int, token_ids: Ids) -> NDArray[np.float32]:
        return self._forward(version, token_ids)[-1].numpy()

    def _forward(self, version: int, token_ids: Ids) -> torch.Tensor:
        ids = torch.from_numpy(token_ids).long()[None]
        return functional_call(self.model, self.parameters(version), (ids,)).logits[0]

    def _packed(self, parameters: dict[str, torch.Tensor]) -> NDArray[np.uint8]:
        layout = whole(
            {name: ("float32", tuple(value.shape)) for name, value in parameters.items()}
        )
        packed = np.zeros(layout.size(), np.uint8)
        for rectangle in layout.rectangles:
            raw = parameters[rectangle.tensor].detach().contiguous().view(-1).view(torch.uint8)
            packed[rectangle.offset : rectangle.end] = raw.numpy()
        return packed
