"""Steps that feed one token a slot, captured once a shape and replayed: no launch, no Python.

Shapes: B = rows of a graph, V = vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from treadle_rollout.adapters.transformers_engine.attention import (
    DeviceBatch,
    KeyValueCache,
    flat_indices,
)
from treadle_rollout.adapters.transformers_engine.batch import Batch, Group, Index

_MIN_KEYS = 64
"""Smallest attended length of a graph."""


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    indices: Tensor
    """Read at every replay."""
    logits: Tensor
    """Of all rows, [B, V]; valid until the next replay of any graph."""


class DecodingGraphs:
    """One graph for each number of rows and attended length, both powers of two.

    Row b of a graph is slot b; rows that do not feed compute into the spare slot.
    """

    def __init__(
        self,
        forward: Callable[[DeviceBatch], Tensor],
        cache: KeyValueCache,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._device = device
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()

    @staticmethod
    def take(batch: Batch) -> bool:
        """Whether the batch is one that graphs are made for."""
        return len(batch.groups) == 1 and batch.groups[0].queries == 1

    def logits(self, batch: Batch) -> Tensor:
        """Logits of the batch's last tokens, [M, V]."""
        rows = _power(int(batch.slots[-1]) + 1, 1, self._cache.spare)
        keys = _power(batch.groups[0].keys, _MIN_KEYS, self._cache.length)
        padded = self._padded(batch, rows, keys)
        if (rows, keys) not in self._captured:
            self._captured[rows, keys] = self._capture(padded)
        captured = self._captured[rows, keys]
        captured.indices.copy_(torch.from_numpy(flat_indices(padded)))
        captured.graph.replay()
        chosen = torch.from_numpy(batch.sampling).to(self._device)
        return captured.logits.index_select(0, chosen)

    def _padded(self, batch: Batch, rows: int, keys: int) -> Batch:
        token_ids, positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        slots = np.full(rows, self._cache.spare)
        token_ids[batch.slots] = batch.token_ids
        positions[batch.slots] = batch.positions
        slots[batch.slots] = batch.slots
        every: Index = np.arange(rows)
        group = Group(
            start=0,
            stop=rows,
            span=(0, rows),
            slots=every,
            queries=1,
            keys=keys,
            positions=positions[:, None],
            pad=None,
            unpad=None,
        )
        return Batch(token_ids, slots, positions, (group,), every, every, every, every)

    def _capture(self, padded: Batch) -> _Captured:
        indices = torch.from_numpy(flat_indices(padded)).to(self._device)
        # Once on a side stream before: what a first forward sets up cannot be captured.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._forward(DeviceBatch(padded, self._cache, indices))
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; their calls are none of this capture's.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._forward(DeviceBatch(padded, self._cache, indices))
        return _Captured(graph, indices, logits)


def _power(value: int, least: int, most: int) -> int:
    """The smallest power of two that holds `value`, between `least` and `most`."""
    return min(max(1 << (value - 1).bit_length(), least), most)
