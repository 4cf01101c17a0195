"""What runs inside vLLM's workers: they read versions from memory that the adapter shares.

vLLM adds this class to its own worker's bases (`worker_extension_cls`). Every worker gets whole
tensors and takes its share, as when it loads a checkpoint.
"""

# pyright: reportMissingModuleSource=false

import contextlib
import os
import select
import signal
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Place = tuple[str, str, Sequence[int], int]
"""Of a tensor in the shared memory: name, dtype, shape, first byte."""

OWNER = "TREADLE_ENGINE_OWNER"
"""Environment variable with the id of the process whose engine this is."""


class ArrivalWorker:
    """Loads weights from `arrival`. Its attributes have names that no worker has."""

    _treadle_arrived: "list[tuple[str, Tensor]]"

    def treadle_map(self, path: str, size: int, places: Sequence[Place]) -> None:
        """Maps the memory, [size] bytes, once; its file may be unlinked afterwards."""
        memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        self._treadle_arrived = [
            (name, _view(memory, dtype, shape, start)) for name, dtype, shape, start in places
        ]

    def treadle_install(self) -> None:
        """Makes what lies in the memory the weights, in whatever form the kernels want them."""
        worker: Any = self
        worker.reload_weights(weights_iterator=iter(self._treadle_arrived))
        model = worker.model_runner.get_model()
        if worker.device.type == "cpu" and model.config.tie_word_embeddings:
            _repack(model.lm_head)

    def treadle_clear_keys(self) -> None:
        """Zeroes all cached keys and values; nobody may need them."""
        worker: Any = self
        _zero(worker.model_runner.kv_caches)


def _zero(caches: Any) -> None:
    """Zeroes tensors; some layers have several."""
    if isinstance(caches, Tensor):
        caches.zero_()
    else:
        for each in caches:
            _zero(each)


def _view(memory: Tensor, dtype: str, shape: Sequence[int], start: int) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    size = kind.itemsize * torch.Size(shape).numel()
    return memory[start : start + size].view(kind).view(*shape)


def _repack(head: Any) -> None:
    """Of a head tied to the embeddings, the copy for the CPU's kernels: a reload leaves it old."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm  # noqa: PLC0415

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def _end_with(owner: int) -> None:
    """Ends this process once its owner has ended: vLLM outlives one that is killed."""
    with contextlib.suppress(ProcessLookupError):
        select.select([os.pidfd_open(owner)], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


if (_owner := os.environ.get(OWNER)) and int(_owner) != os.getpid():
    threading.Thread(target=_end_with, args=(int(_owner),), name="owner", daemon=True).start()
