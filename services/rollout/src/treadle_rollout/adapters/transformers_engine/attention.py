"""Attention of a packed batch over the slots of a key-value cache, as a plugin of transformers.

Shapes: S = slots, K = key-value heads, H = query heads, G = H / K, L = length of a slot,
D = head width; N, R, Q, n as in `batch`.
"""

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from treadle_rollout.adapters.transformers_engine.batch import KEY_STEP, Batch, Group, Index

ATTENTION = "treadle_slots"
"""Name of this attention in transformers."""

_EMPTY: Index = np.zeros(0, np.int64)


class UnservedAttentionError(ValueError):
    """A model asks for attention that this module does not compute."""


class KeyValueCache:
    """Keys and values of all slots, [S + 1, K, L, D] a layer; made at a layer's first write.

    The last slot, `spare`, takes what padding writes and is never read.
    """

    def __init__(self, slots: int, max_context: int) -> None:
        self.spare = slots
        self.max_context = max_context
        self.length = -(-max_context // KEY_STEP) * KEY_STEP
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer whose new keys and values are [N, K, D]."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key), self._zeros(value))
        return self._layers[index]

    def clear(self, slot: int | None = None) -> None:
        """Zeroes one slot, or all. Even masked keys must be finite, since 0 * NaN is NaN."""
        for buffers in self._layers.values():
            for buffer in buffers:
                (buffer if slot is None else buffer[slot]).zero_()

    def _zeros(self, new: Tensor) -> Tensor:
        return new.new_zeros((self.spare + 1, new.shape[1], self.length, new.shape[2]))


class DeviceGroup:
    """A group's index tensors, and its attention."""

    def __init__(
        self, group: Group, positions: Tensor, slots: Tensor, pad: Tensor, unpad: Tensor
    ) -> None:
        self._group = group
        self._positions = positions.view(group.positions.shape)
        self._slots = slots
        self._pad = pad
        self._unpad = unpad
        self._bias: dict[int, Tensor] = {}

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Attends with all queries of the batch [N, H, D]; returns its own, [n, H, D]."""
        group = self._group
        _, heads, width = query.shape
        kv_heads = keys.shape[1]
        share = heads // kv_heads
        part = query[group.start : group.stop]
        if group.pad is not None:
            part = part.index_select(0, self._pad)
        # The query heads that share a key-value head stand beside the Q queries, so that keys
        # and values are read in place instead of repeated.
        part = part.reshape(-1, group.queries, kv_heads, share, width)
        part = part.permute(0, 2, 3, 1, 4).reshape(-1, kv_heads, share * group.queries, width)
        out = scaled_dot_product_attention(
            part,
            self._of_slots(keys),
            self._of_slots(values),
            attn_mask=self._mask(share, query.dtype),
            scale=scale,
        )
        out = out.view(-1, kv_heads, share, group.queries, out.shape[3])
        out = out.permute(0, 3, 1, 2, 4).reshape(-1, heads, out.shape[4])
        return out if group.unpad is None else out.index_select(0, self._unpad)

    def _of_slots(self, buffer: Tensor) -> Tensor:
        used = buffer[:, :, : self._group.keys]
        if self._group.span is None:
            return used.index_select(0, self._slots)
        return used[self._group.span[0] : self._group.span[1]]

    def _mask(self, share: int, dtype: torch.dtype) -> Tensor:
        """Additive mask, [R, 1, Q, keys] tiled to the queries of a key-value head."""
        if share not in self._bias:
            positions = self._positions
            keys = torch.arange(self._group.keys, device=positions.device)
            hidden = keys > positions[:, None, :, None]
            bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
            bias.masked_fill_(hidden, float("-inf"))
            self._bias[share] = bias.repeat(1, 1, share, 1) if self._group.queries > 1 else bias
        return self._bias[share]


class DeviceBatch:
    """A batch on the device of the model, bound to the cache that it reads and writes."""

    def __init__(self, batch: Batch, cache: KeyValueCache, flat: Tensor) -> None:
        """Takes `flat_indices(batch)` as it lies on the device."""
        parts = cast("tuple[Tensor, ...]", flat.split([array.size for array in _indices(batch)]))
        self.token_ids, self.positions, self._slots, self.last = parts[:4]
        self._groups = [
            DeviceGroup(group, *parts[4 + 4 * i : 8 + 4 * i])
            for i, group in enumerate(batch.groups)
        ]
        self._cache = cache
        self._places: dict[int, Tensor] = {}

    @property
    def max_context(self) -> int:
        """Most tokens that a slot holds."""
        return self._cache.max_context

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """Stores the new keys and values, then attends: [N, H, D] and [N, K, D] to [N, H, D]."""
        keys, values = self._cache.layer(layer, key, value)
        places = self._write_places(key.shape[1])
        for buffer, new in ((keys, key), (values, value)):
            width = new.shape[2]
            buffer.view(-1, width).index_copy_(0, places, new.reshape(-1, width))
        parts = [group.attend(query, keys, values, scale) for group in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _write_places(self, kv_heads: int) -> Tensor:
        """Where new keys go in a layer's buffer, seen as [(S + 1) * K * L, D]; [N * K]."""
        if kv_heads not in self._places:
            heads = torch.arange(kv_heads, device=self._slots.device)
            rows = (self._slots * kv_heads)[:, None] + heads
            self._places[kv_heads] = (rows * self._cache.length + self.positions[:, None]).view(-1)
        return self._places[kv_heads]


def flat_indices(batch: Batch) -> Index:
    """All index arrays of a batch in one, so that one copy brings them to the device."""
    return np.concatenate(_indices(batch))


def _indices(batch: Batch) -> list[Index]:
    arrays = [batch.token_ids, batch.positions, batch.slots, batch.last]
    for group in batch.groups:
        optional = (_EMPTY if array is None else array for array in (group.pad, group.unpad))
        slots = group.slots if group.span is None else _EMPTY
        arrays += [group.positions.ravel(), slots, *optional]
    return arrays


def slot_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    slot_batch: DeviceBatch | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: [1, H, N, D], [1, K, N, D] to [1, N, H, D].

    Raises:
        UnservedAttentionError: the model asks for what this function does not compute.
    """
    if slot_batch is None:
        raise UnservedAttentionError("its forward does not hand arguments on to attention")
    if sliding_window is not None and sliding_window < slot_batch.max_context:
        raise UnservedAttentionError(f"a window of {sliding_window} is shorter than max_context")
    if any(argument is not None for argument in (softcap, s_aux, position_bias, attention_mask)):
        raise UnservedAttentionError("its attention has a soft cap, sinks, a bias or a mask")
    out = slot_batch.attend(
        int(module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling,
    )
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION, slot_attention)
