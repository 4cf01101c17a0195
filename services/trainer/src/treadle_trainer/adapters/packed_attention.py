"""Attention over packed segments, as an attention implementation of transformers.

Everything but attention runs on the packed tokens. For attention alone queries, keys and values are
laid out as one row a segment, so that it costs the sum of squared lengths, not the square of the
sum, and needs no mask: rows are filled from the left, so causality keeps what is behind a segment
out of it.

Shapes: N = packed tokens, S = segments, L = tokens of the longest, H = heads, D = width of a head.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from treadle_core.errors import Kind, TreadleError

NAME = "treadle_packed"
"""Name under which transformers knows it."""


class UnsupportedModelError(TreadleError):
    """The model class computes something that the backend cannot do over packed segments."""

    kind = Kind.INVALID
    reason = "UNSUPPORTED_MODEL"


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRows:
    """Where the packed tokens lie when each segment is a row."""

    num_segments: int
    longest: int
    places: Tensor
    """Place in the rows of each packed token, [N]."""

    @classmethod
    def of(cls, segment_ids: Tensor, position_ids: Tensor) -> "SegmentRows":
        """From the segment of each packed token and its place within, both [N]."""
        longest = int(position_ids.max()) + 1
        return cls(int(segment_ids[-1]) + 1, longest, segment_ids * longest + position_ids)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Takes [1, H, N, D] and returns [1, N, H, D], as transformers asks.

    Raises UnsupportedModelError where the model wants more than causal, or windowed, attention.
    """
    rows = extra.get("segment_rows")
    if not isinstance(rows, SegmentRows) or attention_mask is not None or dropout:
        raise _unsupported(module, "does not hand packed attention its arguments")
    for name in ("softcap", "s_aux", "position_bias"):
        if extra.get(name) is not None:
            raise _unsupported(module, f"uses {name}")
    window = extra.get("sliding_window")
    mask = None
    if window is not None and rows.longest > window:
        mask = torch.ones(rows.longest, rows.longest, dtype=torch.bool, device=query.device)
        mask = mask.tril().triu(1 - window)
    if query.is_cuda:  # its float32 kernel that keeps no scores knows no groups of heads
        times = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(times, dim=1) for heads in (key, value))
    attended: Tensor = cast("Any", functional.scaled_dot_product_attention)(
        _rows(query, rows),
        _rows(key, rows),
        _rows(value, rows),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=True,
    )
    flat = attended.transpose(1, 2).flatten(0, 1)
    return flat.index_select(0, rows.places)[None], None


def _rows(packed: Tensor, rows: SegmentRows) -> Tensor:
    """[1, H, N, D] to [S, H, L, D]."""
    # Every place is written or read at most once, so that the gradient is deterministic.
    num_heads, _, width = packed.shape[1:]
    empty = packed.new_zeros(num_heads, rows.num_segments * rows.longest, width)
    laid_out = empty.index_copy(1, rows.places, packed[0])
    return laid_out.view(num_heads, rows.num_segments, rows.longest, width).transpose(0, 1)


def _unsupported(module: torch.nn.Module, why: str) -> UnsupportedModelError:
    name = type(module).__name__
    return UnsupportedModelError(f"{name} {why}", field="model", value=name)


def _no_mask(*_: object, **__: object) -> None:
    """Packed attention needs none."""


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, _no_mask)
