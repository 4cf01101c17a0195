"""Backend plugin `single`: the whole model on one CPU or GPU."""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from treadle_core.errors import InvalidFieldError, Kind, TreadleError
from treadle_trainer.adapters import packed_attention
from treadle_trainer.adapters.packed_attention import SegmentRows, UnsupportedModelError
from treadle_trainer.core.logprobs import token_logprobs
from treadle_trainer.core.packing import MicroBatch
from treadle_trainer.core.ranks import Ranks

OPTIMIZER_FILE = "optimizer.safetensors"
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)
"""Patterns of the files of a tokenizer in a Hugging Face folder."""

_STATE = ("exp_avg", "exp_avg_sq", "step")
_EXACT = ("torch.float32", "F32")
"""What a checkpoint's tensors are, in the words of torch and of safetensors."""
transformers_logging.disable_progress_bar()

BUCKET_BYTES = 32 << 20
"""Gradient that ranks add up at once."""

_TOLERANCE = 1e-4
"""Largest difference that packing may make to a log-probability in float32, in nats."""


class ParametersMismatchError(TreadleError):
    """The tensors of a folder are not those of its model; nothing was loaded."""

    kind = Kind.INVALID
    reason = "PARAMETERS_MISMATCH"


class TensorsCorruptError(TreadleError):
    """A file is no safetensors file: its header is too long, or says what cannot be."""

    kind = Kind.CORRUPT
    reason = "TENSORS_CORRUPT"


class SingleBackend:
    """Backend plugin `single`. Parameters, gradient and optimiser are float32.

    Sets the number of threads of torch, for the whole process. Dropout is off, since the policy was
    sampled without it.
    """

    def __init__(
        self,
        folder: Path,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        device: str = "auto",
        threads: int = 1,
    ) -> None:
        """Loads the policy from a Hugging Face folder, with a fresh AdamW.

        Weight decay applies to matrices only. `device` is "auto" (a GPU where there is one), "cpu",
        "cuda" or "cuda:N". Raises ParametersMismatchError or UnsupportedModelError.
        """
        torch.set_num_threads(threads)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(device)
        self._folder = folder
        self._model = load_model(folder)
        cast("torch.nn.Module", self._model).to(self._device).eval()
        self._parameters = dict(self._model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            _decayed(self._parameters.values(), weight_decay), betas=betas, eps=epsilon, fused=True
        )
        self._check_packing()

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.get_text_config().vocab_size)

    def logprobs(
        self, microbatch: MicroBatch, *, entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor]:
        position_ids = self._tensor(microbatch.position_ids)
        rows = SegmentRows.of(self._tensor(microbatch.segment_ids), position_ids)
        output = self._model(
            input_ids=self._tensor(microbatch.token_ids)[None],
            position_ids=position_ids[None],
            use_cache=False,
            logits_to_keep=self._tensor(microbatch.rows),
            segment_rows=rows,
        )
        return token_logprobs(
            output.logits[0],
            self._tensor(microbatch.targets),
            self._tensor(microbatch.temperatures),
            entropy_gradient=entropy_gradient,
        )

    def add_up_gradient(self, ranks: Ranks) -> None:
        parameters = list(self._parameters.values())
        # Which have one may depend on the segments; what no rank has a gradient for keeps none.
        have = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
        ranks.add_up(have)
        summed = [p for p, count in zip(parameters, have, strict=True) if count]
        for bucket in _buckets(summed, BUCKET_BYTES):
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            ranks.add_up(flat)
            end = 0
            for parameter in bucket:
                start, end = end, end + parameter.numel()
                parameter.grad = flat[start:end].view_as(parameter)

    def clip_gradient(self, max_norm: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), max_norm))

    def update(self, learning_rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.discard_gradient()

    def discard_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def parameters(self) -> Mapping[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def save_policy(self, folder: Path) -> None:
        save_model(self._model, folder)
        copy_tokenizer(self._folder, folder)

    def save_optimizer(self, folder: Path) -> None:
        state: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key in _STATE:
                held = cast("dict[str, Tensor]", self._optimizer.state[parameter])
                if key in held:  # a parameter that never had a gradient has no state
                    state[f"{key}.{name}"] = held[key].contiguous()
        cast("Any", safetensors).save_file(state, folder / OPTIMIZER_FILE)

    def restore_optimizer(self, folder: Path) -> None:
        found = _load_tensors(folder / OPTIMIZER_FILE, self._device)
        dtypes = {name: str(tensor.dtype) for name, tensor in found.items()}
        for path in folder.glob("model*.safetensors"):
            dtypes |= _dtypes_in(path)
        rounded = [f"{name} ({dtype})" for name, dtype in dtypes.items() if dtype not in _EXACT]
        if rounded:
            raise _mismatch(folder, {"not float32": rounded})
        expected = {
            f"{key}.{name}": () if key == "step" else parameter.shape
            for name, parameter in self._parameters.items()
            for key in _STATE
        }
        wrong = [name for name, tensor in found.items() if expected.get(name) != tensor.shape]
        if wrong:
            raise _mismatch(folder / OPTIMIZER_FILE, {"unexpected": wrong})
        for name, parameter in self._parameters.items():
            held = {key: found[f"{key}.{name}"] for key in _STATE if f"{key}.{name}" in found}
            if len(held) not in (0, len(_STATE)):
                raise _mismatch(folder / OPTIMIZER_FILE, {"incomplete": [name]})
            if held:
                self._optimizer.state[parameter] = held

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _check_packing(self) -> None:
        """Refuses a model class whose segments see each other, or that needs another attention."""
        tokens = torch.arange(12, device=self._device) % self.vocab_size
        position_ids = torch.cat([torch.arange(7), torch.arange(5)]).to(self._device)
        segment_ids = (torch.arange(12, device=self._device) >= 7).long()
        rows = SegmentRows.of(segment_ids, position_ids)
        ours = self._logits(tokens, position_ids, segment_rows=rows)[7:]
        self._model.set_attn_implementation("sdpa")
        alone = self._logits(tokens[7:], position_ids[7:])
        self._model.set_attn_implementation(packed_attention.NAME)
        difference = float((ours.log_softmax(-1) - alone.log_softmax(-1)).abs().max())
        if not difference < _TOLERANCE:
            name = type(self._model).__name__
            raise UnsupportedModelError(
                f"{name}: packing changes log-probabilities by {difference:g}",
                field="model",
                limit=f"< {_TOLERANCE}",
                value=difference,
            )

    @torch.no_grad()
    def _logits(self, tokens: Tensor, position_ids: Tensor, **extra: Any) -> Tensor:
        output = self._model(
            input_ids=tokens[None], position_ids=position_ids[None], use_cache=False, **extra
        )
        return output.logits[0].float()


def load_model(folder: Path) -> PreTrainedModel:
    """Loads a folder in float32, exactly: no tensor may be missing, left over or misshapen.

    Safetensors only; a pickle is not looked at. Raises ParametersMismatchError listing the first
    ten that are wrong, TensorsCorruptError, or InvalidFieldError where the folder is no policy.
    """
    if not (folder / "config.json").is_file():
        raise InvalidFieldError("model", limit="a folder with config.json", value=str(folder))
    try:
        model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", _from_pretrained(folder))
    except SafetensorError as error:
        raise _corrupt(folder / "model*.safetensors", error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        limit = "a folder with config.json and model.safetensors"
        raise InvalidFieldError("model", limit=limit, value=f"{folder}: {error}") from error
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = {kind: sorted(map(str, report[kind])) for kind in kinds if report[kind]}
    if wrong:
        raise _mismatch(folder, wrong)
    return model


def _from_pretrained(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=packed_attention.NAME,
        use_safetensors=True,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # the caller reports them
        output_loading_info=True,
    )


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Writes config.json, generation_config.json and model.safetensors."""
    model.save_pretrained(folder)
    # Which attention trained a policy is no property of it.
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("_attn_implementation", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the files of a tokenizer, byte for byte."""
    for pattern in TOKENIZER_FILES:
        for path in source.glob(pattern):
            shutil.copyfile(path, folder / path.name)


def _decayed(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices with weight decay, all else without."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for parameter in parameters:
        (matrices if parameter.ndim >= 2 else others).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def _buckets(parameters: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Neighbours together, up to `size` bytes, or one that is larger."""
    bucket: list[Tensor] = []
    room = size
    for parameter in parameters:
        if bucket and parameter.nbytes > room:
            yield bucket
            bucket, room = [], size
        bucket.append(parameter)
        room -= parameter.nbytes
    if bucket:
        yield bucket


def _load_tensors(path: Path, device: torch.device) -> dict[str, Tensor]:
    try:
        return cast("Any", safetensors).load_file(path, device=str(device))
    except SafetensorError as error:
        raise _corrupt(path, error) from error


def _dtypes_in(path: Path) -> dict[str, str]:
    with cast("Any", safe_open)(path, framework="pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def _corrupt(where: Path, error: SafetensorError) -> TensorsCorruptError:
    return TensorsCorruptError(
        f"{where}: {error}", field="tensors", limit="a safetensors file", value=str(error)
    )


def _mismatch(where: Path, wrong: Mapping[str, list[str]]) -> ParametersMismatchError:
    listed = "; ".join(f"{kind}: {', '.join(names[:10])}" for kind, names in wrong.items())
    return ParametersMismatchError(
        f"{where}: {listed}", field="parameters", limit="exactly the model's", value=listed
    )
